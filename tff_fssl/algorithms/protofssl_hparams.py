"""Hyper-parameters of `protofssl`. TensorFlow-free."""

import dataclasses

from tff_fssl import hparams
from tff_fssl import metrics
from tff_fssl.hparams import hparam
from tff_fssl.semisup import names

METRICS = (
  metrics.of_clients(
    'loss_prototype_label',
    "Cross-entropy of predictions by a client's own prototypes with sharpened"
    " predictions by other clients' prototypes, mean over unlabelled examples;"
    ' `nan` in rounds before there are such prototypes.',
    metrics.NATS,
    metrics.LOWER,
    curve=metrics.Curve(metrics.LOSS_AT_CLIENTS, 'by prototypes'),
    figure='loss',
  ),
)

# Values of `prototypes` and `support`.
HELPERS, GLOBAL, OWN = 'helpers', 'global', 'own'


@dataclasses.dataclass(frozen=True)
class ProtoFsslHparams:
  """Hyper-parameters of ProtoFSSL.

  Episodes in a round are `--client_epochs`, unlabelled examples in an episode
  `--client_batch_size`.
  """

  num_support: int = hparam(
    1,
    'n_S, the labelled examples of each class of whose embeddings an episode'
    ' makes its prototypes (table 5).',
    minimum=1,
    maximum=10**6,
  )
  num_query: int = hparam(
    2,
    'n_Q, the other labelled examples of each class that an episode classifies'
    ' by them (table 5). A class with fewer examples has fewer of them.',
    minimum=1,
    maximum=10**6,
  )
  prototypes: str = hparam(
    HELPERS,
    'What clients are sent. helpers: prototypes of single clients of the round'
    ' before, which the server keeps; global: the mean of all of them, class by'
    ' class, of sums and numbers of examples that are part of the same sum as'
    ' the update, so that secure sums and differential privacy are possible.',
    choices=(HELPERS, GLOBAL),
  )
  num_helpers: int = hparam(
    5,
    '|H|, the most clients whose prototypes are sent and used, and by which the'
    ' global model predicts (section 5). Of a larger cohort, some are drawn.',
    minimum=1,
    maximum=1000,
    when=lambda proto: proto.prototypes == HELPERS,
  )
  helper_interval: int = hparam(
    1,
    'R_H, the rounds after which clients are sent other prototypes: in rounds'
    ' 1, 1 + R_H, 1 + 2 R_H and so on those of the round before, in the others'
    ' the same again; so there are none in the first R_H rounds. The global'
    ' model predicts by the last ones in any case (figures 4b and 5b).',
    minimum=1,
    maximum=10**7,
    when=lambda proto: proto.prototypes == HELPERS,
  )
  sum_norm: float = hparam(
    1.0,
    "The norm that a client's sums and numbers of examples, taken together, are"
    ' scaled down to, so that aggregators that clip them together with the'
    " update clip the update little; clients' shares in the mean are then no"
    ' longer proportional to their examples. 0: they are not scaled.',
    minimum=0,
    when=lambda proto: proto.prototypes == GLOBAL,
  )
  support: str = hparam(
    OWN,
    'By whose prototypes a client predicts in training. own: its own, of n_S'
    ' support examples of each class; global: the mean of those that it was'
    ' sent, which are constants, so that all n_S + n_Q examples of a class are'
    ' classified (section B.1, an ablation). Of classes that nobody sent, and'
    ' in rounds without helpers, its own.',
    choices=(OWN, GLOBAL),
  )
  unlabeled_loss_weight: float = hparam(
    0.3,
    'lambda_U, the weight of the loss on unlabelled examples (table 5).',
    minimum=0,
  )
  temperature: float = hparam(
    0.5,
    'T, by which the mean prediction of helpers is sharpened; 1: it is not'
    ' (table 5).',
    minimum=1e-3,
    maximum=1e3,
  )
  distance: str = hparam(
    names.MEAN_SQUARED,
    'The distance of an embedding from a prototype; its negative is the logit.'
    ' mse: the mean over dimensions of squared differences; sqeuclid: their'
    " sum; euclid: the root of the sum. The authors' code has mse, the paper"
    ' says "Euclidean distance".',
    choices=names.DISTANCES,
  )
  stop_gradient: bool = hparam(
    True,
    "Whether helpers' predictions are labels, through which no gradient flows,"
    " as in the paper. The authors' code differentiates them, too, which also"
    ' rewards embeddings for which these labels are easy to predict.',
  )
  prototype_noise: float = hparam(
    0.0,
    'Standard deviation of Gaussian noise that a client adds to each entry of'
    ' the prototypes that it sends (table 9).',
    minimum=0,
    maximum=1e6,
    when=lambda proto: proto.prototypes == HELPERS,
  )

  def __post_init__(self) -> None:
    hparams.validate(self, 'protofssl.')
    labels_are_predictions = (
      self.support == GLOBAL
      and self.num_sets == 1
      and self.temperature == 1
      and self.stop_gradient
    )
    if labels_are_predictions and self.unlabeled_loss_weight:
      raise hparams.UsageError(
        f'--protofssl.temperature={hparams.to_text(self.temperature)}: with'
        ' --protofssl.support=global and one set of prototypes, the labels of'
        " unlabelled examples are then the client's own predictions, from which"
        ' nothing is learnt; give another temperature or more'
        ' --protofssl.num_helpers, or set --protofssl.unlabeled_loss_weight=0'
      )

  @property
  def sends_rows(self) -> bool:
    """Whether prototypes leave clients beside the sum of updates."""
    return self.prototypes == HELPERS

  @property
  def least_labels(self) -> int:
    """The fewest labels of a class from which a client can learn it."""
    return self.num_support + 1

  @property
  def num_sets(self) -> int:
    """The number of sets of prototypes that the server keeps, at most."""
    return self.num_helpers if self.sends_rows else 1
