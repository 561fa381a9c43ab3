"""The names that flags of algorithms may have as values. TensorFlow-free."""

# Schedules of training signal annealing; see `annealing`.
LINEAR, LOG, EXP = 'linear', 'log', 'exp'
TSA_SCHEDULES = (LINEAR, LOG, EXP)

# What the divergence of a batch is taken of; see `divergence`.
PROBABILITIES, LABELS = 'probabilities', 'labels'

# The distance of an embedding from a prototype; see `prototypes`.
MEAN_SQUARED, SQUARED, EUCLIDEAN = 'mse', 'sqeuclid', 'euclid'
DISTANCES = (MEAN_SQUARED, SQUARED, EUCLIDEAN)
# Which of several classes with equally many votes; see `agreement`.
LOCAL, LOWEST = 'local', 'lowest'

# Where a server keeps the last uploads of clients; see `rounds.last_uploads`.
AUTO, STATE, FILES = 'auto', 'state', 'files'
