"""The names of networks and norms, which flags need before TensorFlow loads."""

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
    builder: 'module:function', which returns the logits, [B, classes]. Its
      arguments are Keras's symbolic input, float32 [B, height, width,
      channels], [B, numbers] or [B, words], the number of classes and one of
      `NORM_NAMES`. For texts, the size of the vocabulary follows.
    inputs: The kinds of examples that it accepts, of `data.names.KINDS`.
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
  'cnn_narrow': ModelInfo(
    'the same with half as many channels, 0.05 M parameters',
    'tff_fssl.models.networks:build_cnn_narrow',
    least_side=4,
  ),
  'lenet': ModelInfo(
    'LeNet-5 as in NIID-Bench, 0.04 M parameters for 28 x 28 gray images',
    'tff_fssl.models.networks:build_lenet',
    least_side=16,
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
  'resnet8': ModelInfo(
    "SAGE's ResNet-8, 1.2 M parameters",
    'tff_fssl.models.networks:build_resnet8',
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

# The sources of batch norm statistics. Static batch norm gathers them after
# training: see `statistics.py`.
POOLED = 'pooled'
MEDIAN = 'median'
BATCH_MEAN = 'batch_mean'
STATIC_STATISTICS = (POOLED, MEDIAN, BATCH_MEAN)
# Keras's moving averages of the batches that clients train on.
MOVING_AVERAGE = 'moving_average'
STATISTICS = (*STATIC_STATISTICS, MOVING_AVERAGE)


# `--model=keras:NAME`: a network of `keras.applications`.
KERAS = 'keras:'
# A user's function takes images, num_classes and norm.
_NUM_PARAMETERS = 3


def layer_pattern(train_layers: str) -> re.Pattern[str]:
  """Compiles `--train_layers`, or raises `UsageError`."""
  try:
    return re.compile(train_layers)
  except re.error as error:
    raise UsageError(
      f'--train_layers={train_layers}: is not a regular expression ({error})'
    ) from error


def file_and_function(model: str) -> tuple[str, str] | None:
  """Splits `FILE.py:function`. Returns None for another `--model`."""
  path, _, function = model.rpartition(':')
  return (path, function) if path.endswith('.py') else None


def check_model(model: str) -> None:
  """Rejects an invalid `--model`, as far as this shows without TensorFlow.

  Args:
    model: A name in `MODELS`, `keras:NAME` or `FILE.py:function`.

  Raises:
    UsageError: If the name is unknown, or the file has no such function.
  """
  if model in MODELS or re.fullmatch(rf'{KERAS}\w+', model, re.ASCII):
    return
  parts = file_and_function(model)
  if parts is None:
    raise UsageError(
      f'--model={model}: allowed are {", ".join(MODELS)}, {KERAS}NAME (of'
      ' keras.applications) and FILE.py:function (docs/models.md)'
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
  defined = {n.name: n for n in module.body if isinstance(n, ast.FunctionDef)}
  if function not in defined:
    raise UsageError(
      f'--model={model}: {path} has no function {function!r}; it has:'
      f' {", ".join(defined) or "none"}{closest(function, defined)}'
    )
  _check_parameters(model, path, defined[function])


def _check_parameters(model: str, path: str, found: ast.FunctionDef) -> None:
  """Rejects a function that does not take the arguments of a builder."""
  if found.decorator_list:
    # A decorator may change the parameters.
    return
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
  """Rejects a network that does not accept examples of a kind.

  Args:
    model: A valid `--model`.
    kind: The kind of the examples.

  Raises:
    UsageError: If a named network needs another kind. Any function of the
      user's passes.
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
      f'--model={model}: takes {" or ".join(i.noun for i in inputs)}, but'
      f' the data set has {kind.noun}; allowed are {", ".join(fits)} and'
      ' FILE.py:function'
    )


def summaries() -> str:
  """Lists all networks and their summaries in one line, for `--help`."""
  return '; '.join(f'{name}: {info.summary}' for name, info in MODELS.items())
