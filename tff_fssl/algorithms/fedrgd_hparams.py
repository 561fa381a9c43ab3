"""Hyper-parameters of `fedrgd`. TensorFlow-free."""

import dataclasses

from tff_fssl import hparams
from tff_fssl import metrics
from tff_fssl.hparams import hparam

METRICS = (
  metrics.Metric(
    'aggregator/inner/gradient_diversity',
    'Gradient diversity of a group, mean |u|² / |mean u|² over its updates u;'
    ' mean over groups. 1 if all are equal; the more they point apart, the'
    ' larger.',
    'ratio',
    curve=metrics.Curve('Gradient diversity'),
    figure='diversity',
  ),
  metrics.Metric(
    'aggregator/inner/{smallest,largest}_group',
    'Clients in the smallest and in the largest group, of those whose update'
    ' weighs more than 0.',
    'count',
  ),
)

# Values of flags.
PERSISTENT_GROUPS, TWO_LEVEL_MEAN = 'persistent_groups', 'two_level_mean'
POSITION, RANDOM = 'position', 'random'
WEAK_VIEW, EACH_VIEW = 'weak_view', 'each_view'


@dataclasses.dataclass(frozen=True)
class FedRgdHparams:
  """Hyper-parameters of FedRGD."""

  confidence_threshold: float = hparam(
    0.95,
    'A pseudo-label is used if its probability is at least this. (In the'
    " authors' code it is a constant; --tao acts on gradient measurements"
    ' only.)',
    minimum=0,
    maximum=1,
  )
  unlabeled_loss_weight: float = hparam(
    1.0,
    'The weight of the loss on pseudo-labels relative to the loss on labels'
    " (value: the authors' code).",
    minimum=0,
  )
  num_groups: int = hparam(
    2,
    'S, the number of groups that the clients of a round form, and of copies of'
    " the model that the server trains. The authors' code has 2 for 10 and 20"
    ' clients a round, 3 for 30 and 5 for 47. With 1, there is one mean of all,'
    ' in which the server counts as one client more.',
    minimum=1,
    maximum=100,
  )
  mode: str = hparam(
    PERSISTENT_GROUPS,
    'What clients start from. persistent_groups: the last mean of their group'
    " (the authors' code); two_level_mean: the mean of the groups' means, and"
    ' the server trains one model that counts in each group (as SemiFL'
    ' implements it, but with weights whose sum is 1 for groups of any size).',
    choices=(PERSISTENT_GROUPS, TWO_LEVEL_MEAN),
    when=lambda fedrgd: fedrgd.has_groups,
  )
  grouping: str = hparam(
    POSITION,
    'How clients are put into groups, anew in each round. position: by their'
    ' position in the cohort, so that groups differ by at most one client;'
    ' random: each client draws its own, which needs nothing of the data source'
    ' and gives unequal groups.',
    choices=(POSITION, RANDOM),
    when=lambda fedrgd: fedrgd.has_groups,
  )
  pseudo_labels: str = hparam(
    WEAK_VIEW,
    'What pseudo-labels are learnt on. weak_view: that of the weak view on the'
    ' strong view (the consistency regularization loss, FixMatch); each_view:'
    " those of both views on these views themselves (the authors' code with"
    ' labels at the clients).',
    choices=(WEAK_VIEW, EACH_VIEW),
  )

  def __post_init__(self) -> None:
    hparams.validate(self, 'fedrgd.')

  @property
  def has_groups(self) -> bool:
    """Whether the server sees sums over less than all clients."""
    return self.num_groups > 1

  @property
  def keeps_groups(self) -> bool:
    """Whether the server keeps a model for each group."""
    return self.has_groups and self.mode == PERSISTENT_GROUPS
