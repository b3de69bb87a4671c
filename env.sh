export PYTHONPATH=/work/me/protos:/work/me/common:/work/me/server:/work/me/worker:/work/me/simulator:/work/me/deploy:/work/me:/work/me/benchmarks
export OMP_NUM_THREADS=1
P=/work/main/.venv/bin/python
