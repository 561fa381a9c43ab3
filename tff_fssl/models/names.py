"""The named networks and norms. TensorFlow-free, for flags."""

import ast
import dataclasses
import re

from tff_fssl import files
from tff_fssl.data import names as data_names
from tff_fssl.hparams import UsageError
from tff_fssl.hparams import closest


@dataclasses.dataclass(frozen=True)
class ModelInfo:
  """Facts about a network that are known without building it.

  Attributes:
    summary: Its description in `--help`.
    builder: 'module:function', called with Keras's symbolic input, float32
      [B, height, width, channels], [B, numbers] or [B, words], the number of
      classes and one of `NORM_NAMES`, for texts also the size of the
      vocabulary; returns the logits, [B, classes].
    inputs: What it is for, of `data.names.KINDS`.
    least_side: The least height and width of the images that it accepts.
  """

  summary: str
  builder: str
  inputs: tuple[data_names.Kind, ...] = (data_names.IMAGES,)
  least_side: int = 1


MODELS = {
  'alexnet': ModelInfo(
    "FedMatch's AlexNet-like network, 6.5 M parameters",
    'tff_fssl.models.networks:build_alexnet',
    least_side=19,
  ),
  'cnn': ModelInfo(
    'a small network of 0.2 M parameters, for CPUs and small images',
    'tff_fssl.models.networks:build_cnn',
    least_side=4,
  ),
  'linear': ModelInfo(
    'a linear classifier, for vectors',
    'tff_fssl.models.networks:build_linear',
    (data_names.IMAGES, data_names.VECTORS),
  ),
  'mlp': ModelInfo(
    'two hidden layers of 256, for vectors and small images',
    'tff_fssl.models.networks:build_mlp',
    (data_names.IMAGES, data_names.VECTORS),
  ),
  'resnet18': ModelInfo(
    "ProtoFSSL's ResNet-18, 11.0 M parameters",
    'tff_fssl.models.networks:build_resnet18',
    least_side=8,
  ),
  'resnet9': ModelInfo(
    "FedMatch's ResNet-9, 6.6 M parameters",
    'tff_fssl.models.networks:build_resnet9',
    least_side=8,
  ),
  'text_cnn': ModelInfo(
    "Kim's network for texts, 2.3 M parameters for 16,384 words",
    'tff_fssl.models.networks:build_text_cnn',
    (data_names.TEXTS,),
  ),
  'wrn28_2': ModelInfo(
    'Wide ResNet-28-2, 1.5 M parameters',
    'tff_fssl.models.networks:build_wrn28_2',
    least_side=8,
  ),
  'wrn28_8': ModelInfo(
    'Wide ResNet-28-8, 23.4 M parameters',
    'tff_fssl.models.networks:build_wrn28_8',
    least_side=8,
  ),
}

# The normalization layers that networks may have.
BATCH_NORM = 'bn'
GROUP_NORM = 'gn'
NO_NORM = 'none'
NORM_NAMES = (BATCH_NORM, GROUP_NORM, NO_NORM)
# `--norm`: with static batch norm, networks have the layers of batch norm.
STATIC_BATCH_NORM = 'sbn'
NORMS = (STATIC_BATCH_NORM, *NORM_NAMES)
BATCH_NORMS = (STATIC_BATCH_NORM, BATCH_NORM)

# Where the statistics of batch norm layers come from. Static batch norm gathers
# them after training: see `statistics.py`.
POOLED = 'pooled'
MEDIAN = 'median'
BATCH_MEAN = 'batch_mean'
STATIC_STATISTICS = (POOLED, MEDIAN, BATCH_MEAN)
# Keras's moving averages of the batches that clients train on.
MOVING_AVERAGE = 'moving_average'
STATISTICS = (*STATIC_STATISTICS, MOVING_AVERAGE)


# `--model=keras:NAME`: a network of `tf.keras.applications`.
KERAS = 'keras:'
# Of a function `FILE.py:function`: images, num_classes, norm.
_NUM_PARAMETERS = 3


def layer_pattern(train_layers: str) -> re.Pattern[str]:
  """`--train_layers`, compiled; raises `UsageError`."""
  try:
    return re.compile(train_layers)
  except re.error as error:
    raise UsageError(
      f'--train_layers={train_layers}: is not a regular expression ({error})'
    ) from error


def file_and_function(model: str) -> tuple[str, str] | None:
  """The parts of `FILE.py:function`; None for another `--model`."""
  path, _, function = model.rpartition(':')
  return (path, function) if path.endswith('.py') else None


def check_model(model: str) -> None:
  """Refuses what is no `--model`, as far as this shows without TensorFlow.

  Args:
    model: A name in `MODELS`, `keras:NAME` or `FILE.py:function`.

  Raises:
    UsageError: If it is none of them, or the file has no such function.
  """
  if model in MODELS or re.fullmatch(rf'{KERAS}\w+', model, re.ASCII):
    return
  parts = file_and_function(model)
  if parts is None:
    raise UsageError(
      f'--model={model}: allowed are {", ".join(MODELS)}, {KERAS}NAME (of'
      ' tf.keras.applications) and FILE.py:function (docs/models.md)'
      f'{closest(model, MODELS)}'
    )
  path, function = parts
  try:
    with files.open_binary(path) as file:
      module = ast.parse(file.read())
  except files.FileError as error:
    raise UsageError(f'--model={model}: {error}') from error
  except (SyntaxError, ValueError) as error:
    raise UsageError(
      f'--model={model}: {path} is not Python: {files.first_line(error)}'
    ) from error
  there = {n.name: n for n in module.body if isinstance(n, ast.FunctionDef)}
  if function not in there:
    raise UsageError(
      f'--model={model}: {path} has no function {function!r}; it has:'
      f' {", ".join(there) or "none"}{closest(function, there)}'
    )
  _check_parameters(model, path, there[function])


def _check_parameters(model: str, path: str, found: ast.FunctionDef) -> None:
  """Refuses a function that cannot be called as one of a network."""
  if found.decorator_list:
    return  # What it takes then is not known.
  given = found.args
  most = len(given.posonlyargs) + len(given.args)
  least = most - len(given.defaults)
  named = [
    argument.arg
    for argument, default in zip(given.kwonlyargs, given.kw_defaults)
    if default is None
  ]
  too_few = most < _NUM_PARAMETERS and given.vararg is None
  if too_few or least > _NUM_PARAMETERS or named:
    raise UsageError(
      f'--model={model}: {path}, line {found.lineno}: {found.name}'
      f'({ast.unparse(given)}) must take images, num_classes and norm, and'
      ' nothing else without a default'
    )


def check_inputs(model: str, kind: data_names.Kind) -> None:
  """Refuses a network that is not for such examples.

  Args:
    model: A valid `--model`.
    kind: What the examples are.

  Raises:
    UsageError: If it is for others. What is for what a function of the user's
      is not known.
  """
  if model in MODELS:
    inputs = MODELS[model].inputs
  elif model.startswith(KERAS):
    inputs = (data_names.IMAGES,)
  else:
    return
  if kind not in inputs:
    fits = [name for name, info in MODELS.items() if kind in info.inputs]
    raise UsageError(
      f'--model={model}: is for {" and ".join(of.noun for of in inputs)}, but'
      f' the data set has {kind.noun}; allowed are {", ".join(fits)} and'
      ' FILE.py:function'
    )


def summaries() -> str:
  """All networks and their summaries in one line, for `--help`."""
  return '; '.join(f'{name}: {info.summary}' for name, info in MODELS.items())
