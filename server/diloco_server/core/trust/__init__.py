"""What is believed of a learner, and what follows from it. The rest of the core asks here.

Two worlds (`guard.trust`). Members may be slow, stale, away, diverged or on broken hardware, and are never cunning:
nothing that a healthy one sends is cut, and what a sick one sends is left out. Strangers may be cunning: nobody there
counts for more than the others make plausible.

trail.py        the reports of a process, as far as they count
arrivals.py     when a learner that was asked will have contributed
lengths.py      how long a contribution can be, by its steps and by what others sent
norms.py        the usual norm of a fragment, kept with its versions
cuts.py         how much one contribution may count for in a round of strangers
counting.py     how many of its tokens count as merged
conduct.py      who is left out for a while, and who is suspected after that
"""
