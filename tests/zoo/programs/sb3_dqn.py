"""DQN of stable-baselines3 on a pole on a cart: the target network is private, the loop is the library's."""

import argparse
import json
import os

import gymnasium
from stable_baselines3 import DQN
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy

import diloco_worker  # diloco

TARGET = ["q_net_target.*"]  # diloco


def make_agent(batch=64, seed=0):
    return DQN(
        "MlpPolicy", gymnasium.make("CartPole-v1"), learning_rate=2.3e-3, batch_size=batch, learning_starts=1000,
        target_update_interval=10, train_freq=256, gradient_steps=128, exploration_final_eps=0.04,
        exploration_fraction=0.16, policy_kwargs={"net_arch": [64, 64]}, seed=seed,
    )  # fmt: skip


def make_model():
    return make_agent().policy


def evaluate(policy):
    """Over so many episodes that chance decides half a percent: the last digits of a policy change each of them."""
    agent, poles = make_agent(), make_vec_env("CartPole-v1", n_envs=100, seed=1)
    agent.policy.load_state_dict(policy.state_dict())
    return float(evaluate_policy(agent, poles, n_eval_episodes=4000)[0])


class Stops(BaseCallback):
    def __init__(self, learner):
        super().__init__()
        self.learner = learner

    def _on_step(self):
        return not self.learner.done


def main():
    parser = argparse.ArgumentParser()
    for name, default in {"steps": 5000, "batch": 64, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    agent, stops = make_agent(args.batch, args.seed), None
    name, shards = os.environ["LEARNER"], os.environ["SHARDS"]  # diloco
    learner = diloco_worker.join(shards, agent.policy, private=TARGET, learner_id=name)  # diloco
    agent.set_random_seed(learner.seed % 2**31)  # diloco
    learner.follow(agent.policy.optimizer, samples=args.batch)  # diloco
    stops = Stops(learner)  # diloco
    agent.learn(min(50_000, 1000 + 2 * args.steps), callback=stops)
    learner.finish()  # diloco
    print(json.dumps({"return": evaluate(agent.policy)}))


if __name__ == "__main__":
    main()
