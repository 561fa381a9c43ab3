"""The networks and norms known by name. TensorFlow-free, for flags."""

# Name -> what `--help` says of it.
MODELS = {
  'cnn': 'a small network of 0.2 M parameters, for CPUs and small images',
  'resnet9': "FedMatch's ResNet-9, 6.6 M parameters",
  'wrn28_2': 'Wide ResNet-28-2, 1.5 M parameters',
  'wrn28_8': 'Wide ResNet-28-8, 23.4 M parameters',
}
MODEL_NAMES = tuple(MODELS)

# The normalization layers that networks are built with. (`--norm=sbn` is
# 'bn' with static statistics: see `statistics.py`.)
NORM_NAMES = ('bn', 'gn', 'none')
