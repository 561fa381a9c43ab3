"""The named data sets and partitions, for flags."""

from collections.abc import Sequence
import dataclasses
from typing import NamedTuple

from tff_fssl.hparams import UsageError

# Policies of strong augmentation; see `augment`.
FL2 = 'fl2'
FIXMATCH = 'fixmatch'
SAGE = 'sage'
SEMIFL = 'semifl'
FEDMATCH = 'fedmatch'
WEAK = 'weak'
AUGMENTATION_POLICIES = (FL2, FIXMATCH, SAGE, SEMIFL, FEDMATCH, WEAK)

# The holders of labels.
LABELS_AT_SERVER = 'labels_at_server'
LABELS_AT_CLIENTS = 'labels_at_clients'
SCENARIOS = (LABELS_AT_SERVER, LABELS_AT_CLIENTS)

# The clients that hold labels, and the choice of labelled examples.
ALL_CLIENTS = 'all'
BALANCED = 'balanced'
OWN = 'own'
SPLIT = 'split'
CLIENT_LABELS = (BALANCED, OWN, SPLIT)
# What a split into training and other examples takes whole.
EXAMPLE, CLIENT = 'example', 'client'
SPLIT_UNITS = (EXAMPLE, CLIENT)

# The label of an example whose label is not known.
UNKNOWN_LABEL = -1
# What people write for such a label, and call the folder of such examples, in
# any case.
UNKNOWN_FOLDERS = frozenset(
  {'unlabeled', 'unlabelled', 'unsupervised', 'unknown', 'unsorted'}
)
UNKNOWN_WORDS = UNKNOWN_FOLDERS | {
  *('', '?', '-1', '-1.0', 'nan', '<na>', 'na', 'n/a', '#n/a', 'nat'),
  *('null', 'none', 'nil', 'missing'),
}

# Splits of training data among clients: see `partition_draw`.
IID = 'iid'
DIRICHLET = 'dirichlet'
FEDMATCH = 'fedmatch'
EXTREME = 'extreme'
SHARDS = 'shards'
PAIRS = 'pairs'
CLASSES = 'classes'
SIZES = 'sizes'
GIVEN = 'given'
NATURAL = 'natural'
GROUPED = 'grouped'
CONTINUOUS = 'continuous'
# Those in which clients have examples by their owners in the data.
OF_OWNERS = (NATURAL, GROUPED, CONTINUOUS)
PARTITIONS = (
  *(IID, DIRICHLET, CLASSES, SIZES, GIVEN),
  *(FEDMATCH, EXTREME, SHARDS, PAIRS, *OF_OWNERS),
)
# Sizes of the k-th client, from 1, in `sizes`: k, k^2 or e^k parts.
LINEAR, SQUARE, EXPONENTIAL = 'linear', 'square', 'exponential'
SIZE_SKEWS = (LINEAR, SQUARE, EXPONENTIAL)
# Partitions that `alpha` shapes.
WITH_ALPHA = (DIRICHLET, PAIRS)
# `alpha` is the concentration of each class, or the sum over classes.
EACH, TOTAL = 'each', 'total'
ALPHA_MEANINGS = (EACH, TOTAL)
# A class's number of examples in `fedmatch` and `extreme`: rounded, or drawn.
EXACT, MULTINOMIAL = 'exact', 'multinomial'
CLASS_DRAWS = (EXACT, MULTINOMIAL)

# `folder:PATH` is a folder of images, `clientdata:PATH` files of TFF's
# `ClientData`, `features:PATH` a file of vectors, `text:PATH` a CSV file of
# texts, `huggingface:OWNER/NAME` a data set of Hugging Face's hub, `idx:DIR` a
# folder of files as MNIST's.
FOLDER, CLIENT_DATA, HUB = 'folder:', 'clientdata:', 'huggingface:'
FEATURES, TEXT, IDX = 'features:', 'text:', 'idx:'
# No examples, but the names of the classes of clients' images.
ONLY_CLASSES = 'classes:'
PATHS = (FOLDER, CLIENT_DATA, FEATURES, TEXT, IDX)
AG_NEWS = 'ag_news'


class Kind(NamedTuple):
  """A kind of examples.

  Attributes:
    noun: Its name.
    dtype: The type in which they are stored.
    axes: Their axes.
  """

  noun: str
  dtype: str
  axes: str

  def __str__(self) -> str:
    return f'{self.noun} ({self.dtype} [N, {self.axes}])'


# A vector has V views, the first of them plain. A text is the numbers of its
# words, followed by zeros.
IMAGES = Kind('images', 'uint8', 'H, W, C')
VECTORS = Kind('vectors', 'float32', 'V, D')
TEXTS = Kind('texts', 'int32', 'L')
KINDS = (IMAGES, VECTORS, TEXTS)
_OF_RANK = {3: IMAGES, 2: VECTORS, 1: TEXTS}


def kind_of(example_shape: Sequence[int]) -> Kind:
  """Finds the kind of examples by their shape.

  Args:
    example_shape: (height, width, channels), (views, numbers) or (words,).

  Returns:
    The kind.

  Raises:
    UsageError: If no kind has such a shape.

  Examples:
    >>> from tff_fssl.data import names
    >>> for shape in ((32, 32, 3), (1, 384), (60,)):
    ...   print(names.kind_of(shape))
    images (uint8 [N, H, W, C])
    vectors (float32 [N, V, D])
    texts (int32 [N, L])
  """
  kind = _OF_RANK.get(len(example_shape))
  if kind is None:
    raise UsageError(
      f'examples of shape {list(example_shape)}: allowed are'
      f' {", ".join(map(str, KINDS))}'
    )
  return kind


def shape_text(example_shape: Sequence[int]) -> str:
  """Describes the shape of an example, in words.

  Examples:
    >>> from tff_fssl.data import names
    >>> for shape in ((32, 32, 3), (1, 384), (60,)):
    ...   print(names.shape_text(shape))
    32 x 32 x 3
    384 numbers
    up to 60 words
  """
  kind = kind_of(example_shape)
  if kind == TEXTS:
    return f'up to {example_shape[0]} words'
  if kind == VECTORS:
    views, size = example_shape
    return f'{size} numbers' + (f' in {views} views' if views > 1 else '')
  return ' x '.join(map(str, example_shape))


@dataclasses.dataclass(frozen=True)
class SplitPreset:
  """A split of a data set's pooled training and test images.

  Attributes:
    train: The number of training images.
    validation: The default number of validation images, which are not among
      them.
    test: The number of test images.
    of_class: Whether these are numbers per class.
  """

  train: int
  validation: int
  test: int
  of_class: bool = False


# Name -> data set -> split. Sources: FedMatch's paper, section 5, and its code
# (config.py, generator.py), ProtoFSSL's code (datasets.py).
OFFICIAL = 'official'
SPLIT_PRESETS = {
  'fedmatch': {
    'cifar10': SplitPreset(54_000, 3_000, 3_000),
    'fashion_mnist': SplitPreset(63_000, 3_500, 3_500),
  },
  'fedmatch_code': {'cifar10': SplitPreset(56_000, 2_000, 2_000)},
  'protofssl': {
    'cifar10': SplitPreset(5_400, 300, 300, of_class=True),
    'svhn_cropped': SplitPreset(5_400, 200, 200, of_class=True),
    'stl10': SplitPreset(1_000, 150, 150, of_class=True),
  },
}


@dataclasses.dataclass(frozen=True)
class DataSetInfo:
  """Facts about a data set that are known without loading it.

  Attributes:
    name: Its name. For data sets of TFDS, their name there.
    num_classes: Classes are 0 .. num_classes - 1.
    example_shape: (height, width, channels), (views, numbers) or (words,).
    num_train: Training examples.
    num_test: Test examples.
    flip: Whether a mirrored image keeps its class, so that augmentation may
      flip images horizontally.
    mean: Per channel, subtracted from pixels scaled to [0, 1], or per number of
      vectors. () for texts, or if it is known only after loading.
    std: The divisors of the result, or () in the same cases.
    loader: 'module:function', which returns the `sources.DataSet`. Its
      arguments are this entry and the folder `data_dir`, perhaps None. '': a
      set of TFDS, which `sources.find` finds.
    uses: The flags of `DataHparams` that have an effect.
    num_validation: The default of --num_validation.
    partition: The default of --partition.
    has_clients: Whether there are training examples for clients. If not, only
      deployed clients have some.
    num_server: Labelled training examples that the data set puts at the server,
      which are then its only ones. 0: it does not say.
  """

  name: str
  num_classes: int
  example_shape: tuple[int, ...]
  num_train: int
  num_test: int
  flip: bool
  mean: tuple[float, ...]
  std: tuple[float, ...]
  loader: str = ''
  uses: frozenset[str] = frozenset()
  num_validation: int = 0
  partition: str = IID
  has_clients: bool = True
  num_server: int = 0

  @property
  def kind(self) -> Kind:
    """Returns the kind of its examples."""
    return kind_of(self.example_shape)

  @property
  def input_shape(self) -> tuple[int, ...]:
    """Returns the shape of an example as a network receives it."""
    is_vector = self.kind == VECTORS
    return self.example_shape[1:] if is_vector else self.example_shape


# Mean and deviation of CIFAR-100 and SVHN, and the flipping of SVHN's digits,
# are from (FL)^2's code. The moments of the other sets are measured on all
# pixels of the training images. All are public.
_INFOS = (
  DataSetInfo(
    name='cifar10',
    num_classes=10,
    example_shape=(32, 32, 3),
    num_train=50_000,
    num_test=10_000,
    flip=True,
    # (FL)^2's code takes ImageNet's, as configs/papers/fl2.toml does.
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
  ),
  DataSetInfo(
    name='cifar100',
    num_classes=100,
    example_shape=(32, 32, 3),
    num_train=50_000,
    num_test=10_000,
    flip=True,
    mean=(129.3 / 255, 124.1 / 255, 112.4 / 255),
    std=(68.2 / 255, 65.4 / 255, 70.4 / 255),
  ),
  DataSetInfo(
    name='svhn_cropped',
    num_classes=10,
    example_shape=(32, 32, 3),
    num_train=73_257,
    num_test=26_032,
    flip=True,
    mean=(0.4380, 0.4440, 0.4730),
    std=(0.1751, 0.1771, 0.1744),
  ),
  DataSetInfo(
    name='fashion_mnist',
    num_classes=10,
    example_shape=(28, 28, 1),
    num_train=60_000,
    num_test=10_000,
    flip=True,
    mean=(0.2860,),
    std=(0.3530,),
  ),
  DataSetInfo(
    name='digits',
    num_classes=10,
    example_shape=(8, 8, 1),
    num_train=1_437,
    num_test=360,
    flip=False,
    mean=(0.3058,),
    std=(0.3761,),
    loader='tff_fssl.data.sources:load_digits',
  ),
)
DATA_SETS = {info.name: info for info in _INFOS}
