"""The declarations of all columns, and docs/metrics.md from them. TF-free."""

from collections.abc import Sequence

from tff_fssl import metrics
from tff_fssl.algorithms import registry
from tff_fssl.metrics import HIGHER
from tff_fssl.metrics import LOWER
from tff_fssl.metrics import NATS
from tff_fssl.metrics import SHARE
from tff_fssl.metrics import Curve
from tff_fssl.metrics import Metric
from tff_fssl.metrics import of_clients

# What processes of every algorithm can report, and what programs add.
_COMMON = (
  Metric(
    'round',
    "The round's number. Rounds before round 1 are the server's pre-training.",
    'count',
  ),
  Metric(
    'bad_round',
    'Whether the round had updates of which none could be used: every client'
    ' failed, or what the aggregator made of the updates was not finite, or the'
    " server's own training was not.",
    'yes or no',
    LOWER,
  ),
  Metric(
    'participation/too_few_clients',
    'With `--min_clients`: whether the round left all as it was, since fewer'
    ' clients were usable. Its other figures are of what was not kept.',
    'yes or no',
    LOWER,
  ),
  Metric(
    'participation/num_drawn',
    'This and the next four with `--dropout_probability`,'
    ' `--straggler_probability` or `--availability_file`: clients drawn for the'
    ' round.',
    'count',
  ),
  Metric(
    'participation/num_dropped_out',
    'Of them, those that did not report.',
    'count',
    LOWER,
  ),
  Metric(
    'participation/num_discarded',
    'Of them, those that reported when enough others had (`--overselect`).',
    'count',
    LOWER,
  ),
  Metric(
    'participation/num_reported',
    'Of them, the others: those that take part, if there are `--min_clients`.',
    'count',
  ),
  Metric(
    'participation/num_stragglers',
    'Of the last, those that make only a part of their steps.',
    'count',
  ),
  of_clients('num_clients', 'Clients in the round.', 'count'),
  of_clients(
    'num_non_finite_clients',
    'Clients whose local training ended in an update that is not finite. They'
    ' weigh nothing.',
    'count',
    LOWER,
  ),
  of_clients(
    'num_rejected_clients',
    'Clients that sent something that no honest client can send, or whose data'
    ' cannot be used. They weigh nothing; the other figures leave them out.',
    'count',
    LOWER,
  ),
  of_clients(
    'num_examples',
    'Examples processed in local steps: summed over clients, with repetition'
    ' over epochs.',
    'count',
  ),
  of_clients(
    'loss_labeled',
    'Cross-entropy of labelled examples (weak view), mean over examples.',
    NATS,
    LOWER,
    curve=Curve(metrics.LOSS_AT_CLIENTS, 'labelled', metrics.DASHED),
    figure='label loss',
  ),
  of_clients(
    'labeled_accuracy',
    'Accuracy on the labelled examples of the batches, of the local network'
    ' before each step.',
    SHARE,
    HIGHER,
    curve=Curve(metrics.LABELED_ACCURACY, 'at clients'),
  ),
  of_clients(
    'loss_pseudo_label',
    '`fixmatch`, `semifl`, `fl2`, `fedmatch`, `fedrgd`, `fedswitch`, `ts_...`:'
    ' cross-entropy of strong views with their pseudo-labels, mean over the'
    ' examples whose pseudo-label is kept.',
    NATS,
    LOWER,
    curve=Curve(metrics.LOSS_AT_CLIENTS, 'pseudo-labels'),
    figure='loss',
  ),
  of_clients(
    'loss_regularization',
    'Where the model has weight regularizers: what they add to the loss, mean'
    ' over steps.',
    better=LOWER,
  ),
  of_clients(
    'pseudo_label_ratio',
    'Pseudo-labels that are kept, among all. `fl2` and `semifl` make them once'
    ' a round, the others for each batch. `mixmatch` keeps all.',
    SHARE,
    curve=Curve(metrics.PSEUDO_LABELS, 'kept'),
    figure='kept',
    compared='pseudo-labels kept',
  ),
  of_clients(
    'pseudo_label_accuracy',
    'Kept pseudo-labels that are right, among the kept ones whose hidden label'
    ' is known. Of a soft pseudo-label (`uda`, `mixmatch`), the most probable'
    ' class counts.',
    SHARE,
    HIGHER,
    curve=Curve(metrics.PSEUDO_LABEL_ACCURACY, 'kept'),
    figure='right',
    compared='right among them',
  ),
  of_clients(
    'pseudo_label_correct_ratio',
    'Kept and right, among all whose hidden label is known.',
    SHARE,
    HIGHER,
    curve=Curve(metrics.RIGHT_AND_WRONG, 'right'),
  ),
  of_clients(
    'pseudo_label_wrong_ratio',
    'Kept and wrong, among all whose hidden label is known.',
    SHARE,
    LOWER,
    curve=Curve(metrics.RIGHT_AND_WRONG, 'wrong', metrics.DASHED),
  ),
  of_clients(
    'pseudo_label_correct_to_wrong',
    'Right ones to wrong ones, among the kept; `inf` if none is wrong.',
    'ratio',
    HIGHER,
  ),
  of_clients(
    'aggregation_weight_min',
    'The smallest share that a client had in the aggregation, of those that'
    ' report.',
    SHARE,
    curve=Curve('Aggregation weights', 'min', metrics.DASHED),
  ),
  of_clients(
    'aggregation_weight_max',
    'The largest.',
    SHARE,
    curve=Curve('Aggregation weights', 'max'),
  ),
  of_clients(
    'aggregation_weight_entropy',
    'Entropy of the shares, in nats; log of the number of clients if all are'
    ' equal.',
  ),
  Metric(
    'aggregator/num_weighted_clients',
    'Clients whose update weighed more than 0.',
    'count',
  ),
  Metric(
    'aggregator/num_rejected_clients',
    'Updates that the aggregation rejected: those of'
    ' `client_work/train/num_rejected_clients`, and under `secure` also those'
    ' that are not finite.',
    'count',
    LOWER,
  ),
  Metric(
    'aggregator/inner/...',
    'What the aggregator itself measures. `robust`: `num_clipped`,'
    ' `num_left_out`, the clipping norm after the round, `limits/median_norm`,'
    ' and `too_few_clients`, 1 if no update was applied because less than half'
    ' of the cohort, or fewer than three clients, sent one that counts; else 0.'
    " `secure`, `compression`: TFF's"
    ' zeroing and clipping norms and counts. `dp`: `dp_query_metrics/clip`, the'
    ' clipping norm.',
  ),
  Metric('aggregator/epsilon', '`dp`: epsilon spent so far, at', '', LOWER),
  Metric('aggregator/delta', 'this delta.'),
  Metric(
    'finalizer/update_skipped',
    'Whether the server applied no update, since there was none or it was not'
    ' finite.',
    'yes or no',
    LOWER,
  ),
  Metric(
    'finalizer/update_norm',
    'The combined update of the trainable weights, and of further networks that'
    ' clients send back; 0 if skipped.',
    'norm',
  ),
  Metric(
    'finalizer/weights_norm',
    "The model's trainable weights before the update.",
    'norm',
  ),
  Metric(
    'finalizer/server_loss_labeled',
    "Cross-entropy of the server's labelled examples in its own training (weak"
    ' view), mean over examples and epochs.',
    NATS,
    LOWER,
    curve=Curve('Loss at the server'),
    figure='server',
  ),
  Metric(
    'finalizer/server_loss_regularization',
    'What weight regularizers add to it, mean over steps.',
    better=LOWER,
  ),
  Metric(
    'finalizer/server_labeled_accuracy',
    'Accuracy on them, of the network before each step.',
    SHARE,
    HIGHER,
    curve=Curve(metrics.LABELED_ACCURACY, 'at the server', metrics.DASHED),
  ),
  Metric(
    'finalizer/server_num_examples',
    'Examples that the server processed, with repetition over epochs.',
    'count',
  ),
  Metric(
    'finalizer/server_non_finite',
    "Whether the server's training was not finite; it is then dropped.",
    'yes or no',
    LOWER,
  ),
  Metric(
    'last_phase/num_rejected_clients',
    'Clients whose batch norm sums no client can have.',
    'count',
    LOWER,
  ),
  Metric(
    'communication/bytes_{down,up}',
    'Sent to all clients of the round together, and received from them. All'
    ' figures of communication are computed from what travels in a deployment;'
    ' they are 0 where each client trains alone.',
    metrics.BYTES,
    LOWER,
    compared='{} a round',
  ),
  Metric(
    'communication/bytes_{down,up}_per_client',
    'Sent to a client of the round, and received from it; the sums of the parts'
    ' below.',
    metrics.BYTES,
    LOWER,
  ),
  Metric(
    'communication/percent_of_model_{down,up}',
    'These, compared with the bytes of one dense model: its weights and batch'
    ' norm statistics.',
    metrics.PERCENT,
    LOWER,
    compared='{} a client, % of a model',
  ),
  Metric(
    'communication/bytes_{down,up}_model',
    'Of them, the model, or its update and its weight.',
    metrics.BYTES,
    LOWER,
  ),
  Metric(
    'communication/bytes_{down,up}_statistics',
    'Of them, for the phase that gathers static batch norm statistics: the'
    ' weights once more, and the sums.',
    metrics.BYTES,
    LOWER,
  ),
  Metric(
    'communication/bytes_{down,up}_scalars',
    "Of them, the round's number and the algorithm's signals to clients, and"
    " the clients' reports.",
    metrics.BYTES,
    LOWER,
  ),
  Metric(
    'communication/bytes_{down,up}_...',
    'Of them, each other part that an algorithm sends: a set of weights, by its'
    ' name (`teacher`), or `exchange`, what the server keeps of clients.',
    metrics.BYTES,
    LOWER,
  ),
  Metric(
    'exchange/num_rows',
    'Clients of the round whose row for the server was usable (`local_...`: the'
    " client's own model; `protofssl`: its prototypes; with global ones, 1 if"
    ' their sum was).',
    'count',
  ),
  Metric(
    'exchange/num_disputed_rows',
    'Rows left out because several clients of the round claimed the same id.',
    'count',
    LOWER,
  ),
)

_TEST, _VALIDATION = 'Test accuracy', 'Validation accuracy'


def _of_each_split(
  name: str, meaning: str, label: str, dashes: str
) -> list[Metric]:
  """An accuracy on test and on validation images, drawn with the model's."""
  return [
    Metric(
      f'{split}/{name}', meaning, SHARE, HIGHER, Curve(panel, label, dashes)
    )
    for split, panel in (('test', _TEST), ('validation', _VALIDATION))
  ]


_EVALUATION = (
  Metric('round', 'The round after which the model was evaluated.', 'count'),
  Metric(
    'test/accuracy',
    'Accuracy of the global model on the test images. Where each client trains'
    " alone (`local_...`): mean over all clients of their own models'"
    ' accuracies; clients that have not taken part yet count with the initial'
    ' weights.',
    SHARE,
    HIGHER,
    curve=Curve(_TEST, 'accuracy'),
  ),
  Metric(
    'test/loss',
    'Its mean cross-entropy on them; likewise, the mean over clients.',
    NATS,
    LOWER,
    Curve(metrics.LOSS_ON_HELD_OUT, 'test'),
  ),
  Metric(
    'validation/accuracy',
    'Accuracy on the `--num_validation` images that were taken out of the'
    ' training images.',
    SHARE,
    HIGHER,
    curve=Curve(_VALIDATION, 'accuracy'),
  ),
  Metric(
    'validation/loss',
    'Mean cross-entropy on them.',
    NATS,
    LOWER,
    Curve(metrics.LOSS_ON_HELD_OUT, 'validation', metrics.DASHED),
  ),
  Metric(
    '{test,validation}/accuracy_deviation',
    'Where each client trains alone: standard deviation over clients of their'
    ' accuracies.',
    SHARE,
  ),
  *_of_each_split(
    'accuracy_worst_decile',
    'Where each client trains alone: mean of the lowest tenth of their'
    ' accuracies, rounded up to whole clients.',
    'worst decile of clients',
    metrics.DASHED,
  ),
  *_of_each_split(
    'average/accuracy',
    'With `--average_decay`: accuracy of the moving average of the global'
    ' models.',
    'moving average',
    metrics.DOTTED,
  ),
  Metric(
    '{test,validation}/average/loss', 'Its mean cross-entropy.', NATS, LOWER
  ),
  *_of_each_split(
    'teacher/accuracy',
    '`fedswitch`, `ts_...`: accuracy of the teacher. (The model is the'
    ' student.)',
    'teacher',
    metrics.DASHED,
  ),
  Metric(
    '{test,validation}/teacher/loss', 'Its mean cross-entropy.', NATS, LOWER
  ),
  *_of_each_split(
    'sigma/accuracy',
    'With `--fedmatch.evaluate_sets`: accuracy of sigma alone.',
    'sigma alone',
    metrics.DASHED,
  ),
  *_of_each_split(
    'psi/accuracy',
    'The same of psi alone.',
    'psi alone',
    metrics.DOTTED,
  ),
  Metric(
    '{test,validation}/{sigma,psi}/loss',
    'Their mean cross-entropies.',
    NATS,
    LOWER,
  ),
)

_TIMING = (
  Metric('round', 'The round.', 'count'),
  Metric(
    'seconds/round',
    'The whole of the round, without evaluation and saving.',
    metrics.SECONDS,
    LOWER,
    compared='time of a round',
  ),
  Metric(
    'seconds/compile',
    'Of it, building and compiling computations, in the first rounds.',
    metrics.SECONDS,
    LOWER,
  ),
  Metric(
    'seconds/server', 'Of it, what the server computes.', metrics.SECONDS, LOWER
  ),
  Metric(
    'seconds/clients',
    'Of it, what clients compute, without `seconds/aggregation`.',
    metrics.SECONDS,
    LOWER,
  ),
  Metric(
    'seconds/aggregation',
    'Of it, adding up what clients sent.',
    metrics.SECONDS,
    LOWER,
  ),
  Metric('seconds/evaluation', 'Evaluating the model.', metrics.SECONDS, LOWER),
  Metric(
    'peak_memory_mb',
    'The most memory that the process has held so far.',
    'MiB',
    LOWER,
  ),
)

_INTRODUCTION = (
  "What each column of a run's CSV files means. An empty cell or `nan` says"
  ' that there was nothing to take the figure of. Figures of clients are over'
  ' the clients of the round whose report was accepted (see'
  ' [embedding.md](embedding.md)); those that average over examples weigh every'
  ' example alike, whichever client and batch it was in. Under'
  ' `--aggregator=secure` and `dp`, clients report nothing: of the columns'
  ' `client_work/train/...`, only `num_clients` is there.',
  'This page is made from the declarations of the metrics, by `python'
  ' tools/update_metrics.py`; [extending.md](extending.md) says how an'
  ' algorithm declares its own.',
)
_TABLES = (
  ('metrics/train.csv: one row a round', '', _COMMON),
  ('metrics/eval.csv: one row an evaluation', '', _EVALUATION),
  (
    'metrics/timing.csv: one row a round',
    'These figures differ from run to run, also of one seed.',
    _TIMING,
  ),
)


def tables() -> dict[str, tuple[Metric, ...]]:
  """The declarations of the columns of each table."""
  return {
    'train.csv': (*_COMMON, *_of_algorithms()),
    'eval.csv': _EVALUATION,
    'timing.csv': _TIMING,
  }


def all_metrics() -> tuple[Metric, ...]:
  """The declarations of all columns of all tables."""
  return tuple(metric for table in tables().values() for metric in table)


def _of_algorithms() -> dict[Metric, list[str]]:
  """What algorithms declare -> the algorithms that have it."""
  names: dict[Metric, list[str]] = {}
  for algorithm in registry.REGISTRY.values():
    for metric in algorithm.metrics:
      names.setdefault(metric, []).append(algorithm.name)
  return names


def page() -> str:
  """docs/metrics.md."""
  units = ', '.join(f'`{name}`: {text}' for name, text in metrics.UNITS.items())
  parts = ['# Metrics\n']
  parts += [f'{text}\n' for text in (*_INTRODUCTION, f'Units: {units}.')]
  for title, remark, members in _TABLES:
    parts.append(f'## {title}\n')
    if remark:
      parts.append(f'{remark}\n')
    parts.append(_markdown(members))
    if members is _COMMON:
      grouped: dict[tuple[str, ...], list[Metric]] = {}
      for metric, names in _of_algorithms().items():
        grouped.setdefault(tuple(names), []).append(metric)
      for users, own in grouped.items():
        heading = ', '.join(f'`{name}`' for name in users)
        parts += [f'### Only {heading}\n', _markdown(own)]
  return '\n'.join(parts)


def _markdown(members: Sequence[Metric]) -> str:
  """A table; arrows say where higher or lower values are better."""
  lines = ['| column | unit | better | meaning |', '|---|---|---|---|']
  lines += [
    f'| `{m.column}` | {m.unit} | {metrics.ARROWS[m.better]} | {m.meaning} |'
    for m in members
  ]
  return '\n'.join(lines) + '\n'
