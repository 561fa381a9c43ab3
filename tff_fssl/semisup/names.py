"""The names that flags of algorithms may have as values. TensorFlow-free."""

# Schedules of training signal annealing; see `annealing`.
LINEAR, LOG, EXP = 'linear', 'log', 'exp'
TSA_SCHEDULES = (LINEAR, LOG, EXP)

# What the divergence of a batch is taken of; see `divergence`.
PROBABILITIES, LABELS = 'probabilities', 'labels'

# Which of several classes with equally many votes; see `agreement`.
LOCAL, LOWEST = 'local', 'lowest'
