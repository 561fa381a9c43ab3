"""All algorithms by name. TensorFlow-free until one is built."""

from typing import Any

from tff_fssl import metrics as metrics_lib
from tff_fssl.algorithms import entry
from tff_fssl.algorithms import fedcon_hparams
from tff_fssl.algorithms import fedmatch_hparams
from tff_fssl.algorithms import fedrgd_hparams
from tff_fssl.algorithms import fedswitch_hparams
from tff_fssl.algorithms import fixmatch_hparams
from tff_fssl.algorithms import fl2_hparams
from tff_fssl.algorithms import local_training_hparams
from tff_fssl.algorithms import mixmatch_hparams
from tff_fssl.algorithms import protofssl_hparams
from tff_fssl.algorithms import semifl_hparams
from tff_fssl.algorithms import supervised_hparams
from tff_fssl.algorithms import uda_hparams
from tff_fssl.rounds import round_hparams as round_hparams_lib

Algorithm = entry.Algorithm
Capabilities = entry.Capabilities
Compute = entry.Compute
Passes = entry.Passes
_SERVER = round_hparams_lib.LABELS_AT_SERVER
_CLIENTS = round_hparams_lib.LABELS_AT_CLIENTS

# Sohn et al. and Xie et al. pass all views through the network as one batch.
_WHOLE_BATCH = (
  "The authors' code (google-research) differentiates one pass over all views,"
  ' the weak ones included, whose gradients are 0.'
)


def _alone(
  kind: str,
  what: str,
  hparams: type[Any],
  metrics: tuple[metrics_lib.Metric, ...] = (),
  **tiny_hparams: Any,
) -> Algorithm:
  """The entry of clients that train alone."""
  module = 'tff_fssl.algorithms.local_training'
  return Algorithm(
    f'local_{kind}',
    f'{what} by each client alone, without federation.',
    hparams,
    f'{module}:build_{kind}',
    {
      part: f'{module}:build_{part}'
      for part in ('server', 'exchange', 'prediction', 'alone')
    },
    capabilities=Capabilities(
      scenarios=(_CLIENTS,),
      trains_clients=(_CLIENTS,),
      client_state=True,
      per_client_broadcast=True,
      weight_sets_down=0,
      weight_sets_up=0,
    ),
    compute=Compute() if kind == 'supervised' else Compute(Passes(2, 1)),
    tiny_hparams=tiny_hparams,
    # Its server does nothing.
    metrics=tuple(m for m in metrics if not m.column.startswith('finalizer/')),
    paper='Jeong et al., ICLR 2021 (a baseline of FedMatch)',
  )


# What FedSwitch and its baselines with a teacher have in common. The paper's
# optimizers are plain SGD and FedAvg, with FedProx's term.
_FEDSWITCH: dict[str, Any] = {
  'compute': Compute(Passes(2, 1)),
  'round_defaults': {
    'client_epochs': 1,
    'server_epochs': 1,
    'max_gradient_norm': 0.0,
    'num_pretraining_rounds': 0,
    'proximal_strength': 0.01,
    'server_optimizer_momentum': 0.0,
  },
  'tiny_hparams': {'confidence_threshold': 0.3},
  'paper': 'Zhao et al., arXiv 2023',
}


def _teacher_student(
  name: str, summary: str, hparams: type[Any], weight_sets_up: int
) -> Algorithm:
  """The entry of an algorithm of `teacher_student.py`."""
  module = 'tff_fssl.algorithms.teacher_student'
  return Algorithm(
    name,
    summary,
    hparams,
    f'{module}:build_{name}',
    {
      'server': f'{module}:build_{name}_server',
      'prediction': 'tff_fssl.local.teaching:build_prediction',
    },
    capabilities=Capabilities(
      weight_sets_down=2, weight_sets_up=weight_sets_up
    ),
    **_FEDSWITCH,
  )


REGISTRY = {
  algorithm.name: algorithm
  for algorithm in (
    Algorithm(
      'supervised',
      'Labels only: FedAvg at clients, or training at the server only.',
      supervised_hparams.SupervisedHparams,
      'tff_fssl.algorithms.supervised:build_local_algorithm',
      capabilities=Capabilities(trains_clients=(_CLIENTS,)),
      paper='McMahan et al., AISTATS 2017; Li et al., MLSys 2020',
    ),
    Algorithm(
      'fixmatch',
      'FixMatch at clients, with FedAvg or FedProx.',
      fixmatch_hparams.FixMatchHparams,
      'tff_fssl.algorithms.fixmatch:build_local_algorithm',
      compute=Compute(Passes(2, 1), authors=Passes(2, 2), note=_WHOLE_BATCH),
      paper='Sohn et al., NeurIPS 2020',
    ),
    Algorithm(
      'uda',
      'UDA with annealed labels at clients, with FedAvg or FedProx.',
      uda_hparams.UdaHparams,
      'tff_fssl.algorithms.uda:build_local_algorithm',
      {'server_training': 'tff_fssl.algorithms.uda:build_server_training'},
      compute=Compute(Passes(2, 1), authors=Passes(2, 2), note=_WHOLE_BATCH),
      tiny_hparams={'confidence_threshold': 0.3, 'tsa_rounds': 2},
      metrics=uda_hparams.METRICS,
      paper='Xie et al., NeurIPS 2020',
    ),
    Algorithm(
      'mixmatch',
      'MixMatch at clients, with FedAvg or FedProx.',
      mixmatch_hparams.MixMatchHparams,
      'tff_fssl.algorithms.mixmatch:build_local_algorithm',
      capabilities=Capabilities(without_mixing='mixup_concentration=0'),
      compute=Compute(
        Passes(4, 2),
        authors=Passes(4, 2),
        note='Two views: each is predicted once, and learnt once when mixed.',
      ),
      tiny_hparams={'ramp_rounds': 0},
      metrics=mixmatch_hparams.METRICS,
      paper='Berthelot et al., NeurIPS 2019',
    ),
    Algorithm(
      'semifl',
      'SemiFL: global pseudo-labels, mixup, alternate training.',
      semifl_hparams.SemiFlHparams,
      'tff_fssl.algorithms.semifl:build_local_algorithm',
      capabilities=Capabilities(
        scenarios=(_SERVER,),
        trains_clients=(_SERVER,),
        without_mixing='mixup=false',
      ),
      compute=Compute(
        Passes(2, 2),
        once=Passes(1, 0),
        authors=Passes(3, 2),
        note="The authors' code also predicts the weak view, for its log.",
      ),
      round_defaults={
        'client_batch_size': 10,
        'learning_rate_schedule': 'cosine',
        'num_pretraining_rounds': 0,
      },
      tiny_hparams={'confidence_threshold': 0.3},
      metrics=semifl_hparams.METRICS,
      paper='Diao et al., NeurIPS 2022',
    ),
    Algorithm(
      'fl2',
      '(FL)^2: adaptive thresholds, sharpness-aware consistency,'
      ' learning-status-aware aggregation.',
      fl2_hparams.Fl2Hparams,
      'tff_fssl.algorithms.fl2:build_local_algorithm',
      capabilities=Capabilities(
        extra_uploads=('learning status (in the weight)',),
        own_weights='learning_status_aggregation',
      ),
      compute=Compute(
        Passes(2, 3),
        once=Passes(1, 0),
        authors=Passes(5, 3),
        note='6 if the kept examples of a batch are the confident ones; 3 if no'
        " example is confident. The authors' code predicts the weak view for"
        ' nothing, and repeats the pass at W for Q, L_p and L_a.',
      ),
      metrics=fl2_hparams.METRICS,
      paper='Lee et al., NeurIPS 2024',
    ),
    Algorithm(
      'fedswitch',
      'FedSwitch: teacher or student makes the pseudo-labels of a round.',
      fedswitch_hparams.FedSwitchHparams,
      'tff_fssl.algorithms.fedswitch:build_local_algorithm',
      {
        'server': 'tff_fssl.algorithms.fedswitch:build_server',
        'prediction': 'tff_fssl.local.teaching:build_prediction',
      },
      capabilities=Capabilities(
        extra_uploads=('divergences of predictions from uniform',),
        weight_sets_down=2,
        signals='switches',
        without_signals='labeler=teacher',
      ),
      metrics=fedswitch_hparams.METRICS,
      **_FEDSWITCH,
    ),
    _teacher_student(
      'ts_server_ema',
      'TS-Server EMA: the server keeps a teacher, which labels.',
      fedswitch_hparams.TsServerHparams,
      weight_sets_up=1,
    ),
    _teacher_student(
      'ts_client_ema',
      'TS-Client EMA: clients train a teacher, too, and send it back.',
      fedswitch_hparams.TsClientHparams,
      weight_sets_up=2,
    ),
    Algorithm(
      'fedcon',
      'FedCon: consistency of two networks, at server and clients.',
      fedcon_hparams.FedConHparams,
      'tff_fssl.algorithms.fedcon:build_local_algorithm',
      {
        part: f'tff_fssl.algorithms.fedcon:build_{part}'
        for part in ('server', 'server_training', 'exchange', 'head_stays')
      },
      capabilities=Capabilities(
        scenarios=(_SERVER,),
        trains_clients=(_SERVER,),
        client_state_if='keeps_state',
        head_stays=True,
        signals='keeps_state',
        without_signals='client_state=none',
      ),
      compute=Compute(
        Passes(4, 2),
        note='Two views through both networks, without the head, and through'
        ' the projector, which is not counted.',
      ),
      round_defaults={
        'client_batch_size': 50,
        'client_epochs': 1,
        'max_gradient_norm': 0.0,
        'momentum': 0.5,
        'nesterov': False,
        'num_pretraining_rounds': 1,
        'server_batch_size': 10,
        'server_epochs': 1,
        'server_learning_rate': 0.01,
        'server_optimizer_momentum': 0.0,
        'weight_decay': 0.0,
      },
      tiny_hparams={'hidden_size': 8, 'ramp_rounds': 1},
      metrics=fedcon_hparams.METRICS,
      paper='Long et al., arXiv 2021',
    ),
    Algorithm(
      'fedrgd',
      'FedRGD: groups of clients that go on from their own means.',
      fedrgd_hparams.FedRgdHparams,
      'tff_fssl.algorithms.fedrgd:build_local_algorithm',
      {
        'server': 'tff_fssl.algorithms.fedrgd:build_server',
        'groups': 'tff_fssl.algorithms.fedrgd:build_groups',
      },
      capabilities=Capabilities(
        extra_uploads=('group (two numbers)',),
        groups='has_groups',
        without_groups='num_groups=1',
      ),
      compute=Compute(Passes(2, 1)),
      # Of the optimizers the paper's, but for the rate, which depends on the
      # network: 0.165 for ResNet-18, 0.0075 for ResNet-9.
      round_defaults={
        'client_batch_size': 64,
        'client_epochs': 1,
        'client_labeled_batch_size': 64,
        'max_gradient_norm': 0.0,
        'num_pretraining_rounds': 0,
        'server_batch_size': 64,
        'server_epochs': 1,
        'server_optimizer_momentum': 0.0,
        'weight_decay': 1e-4,
      },
      norm='gn',
      tiny_hparams={'confidence_threshold': 0.3},
      metrics=fedrgd_hparams.METRICS,
      paper='Zhang et al., arXiv 2020',
    ),
    Algorithm(
      'protofssl',
      "ProtoFSSL: pseudo-labels by other clients' prototypes, in episodes.",
      protofssl_hparams.ProtoFsslHparams,
      'tff_fssl.algorithms.protofssl:build_local_algorithm',
      {
        part: f'tff_fssl.algorithms.protofssl:build_{part}'
        for part in ('exchange', 'prediction', 'embeds')
      },
      capabilities=Capabilities(
        scenarios=(_CLIENTS,),
        trains_clients=(_CLIENTS,),
        extra_uploads=('prototypes of the classes that a client has',),
        signals='sends_rows',
        without_signals='prototypes=global',
        labels_of_class='least_labels',
      ),
      compute=Compute(
        Passes(1, 1),
        once=Passes(1, 0),
        authors=Passes(1, 1),
        note='Once: for each labelled example, whose prototypes are sent.',
      ),
      round_defaults={
        'client_epochs': 10,
        'client_batch_size': 100,
        'client_optimizer': 'rmsprop',
        'client_learning_rate': 0.001,
        'weight_decay': 0.0001,
        'max_gradient_norm': 0.0,
        'server_optimizer_momentum': 0.0,
      },
      normalization='scale',
      tiny_hparams={'num_query': 1},
      metrics=protofssl_hparams.METRICS,
      paper='Kim et al., arXiv 2022',
    ),
    Algorithm(
      'fedmatch',
      'FedMatch: labels move sigma, unlabelled examples psi; clients help.',
      fedmatch_hparams.FedMatchHparams,
      'tff_fssl.algorithms.fedmatch:build_local_algorithm',
      {
        part: f'tff_fssl.algorithms.fedmatch:build_{part}'
        for part in ('server_training', 'server', 'exchange', 'prediction')
      },
      capabilities=Capabilities(
        client_state_if='remembers',
        extra_uploads=(
          'its upload apart from those of others',
          'predictions for an image of noise',
          'its learning rate',
        ),
        per_client_broadcast=True,
        weight_sets_down=2,
        weight_sets_up=2,
        signals='remembers',
        without_signals='remembered_clients=0',
      ),
      compute=Compute(
        Passes(2, 2),
        once=Passes(3, 0),
        note='Without helpers, that is in nine of ten rounds, 4, and 1 once. Of'
        ' the passes once, one is over a single image of noise, though it'
        " counts for each example. The authors' code asks helpers in each"
        ' step.',
      ),
      round_defaults={
        'client_epochs': 1,
        'client_batch_size': 100,
        'client_learning_rate': 1e-3,
        'max_gradient_norm': 0.0,
        'momentum': 0.0,
        'num_pretraining_rounds': 1,
        'server_batch_size': 100,
        'server_epochs': 1,
        'server_learning_rate': 1e-3,
        'server_optimizer_momentum': 0.0,
        'weight_decay': 0.0,
      },
      normalization='scale',
      tiny_hparams={'confidence_threshold': 0.3, 'helper_interval': 1},
      metrics=fedmatch_hparams.METRICS,
      paper='Jeong et al., ICLR 2021',
    ),
    _alone('supervised', 'Labels only', supervised_hparams.SupervisedHparams),
    _alone(
      'uda',
      'UDA',
      local_training_hparams.LocalUdaHparams,
      uda_hparams.METRICS,
      confidence_threshold=0.3,
      tsa_rounds=2,
    ),
    _alone(
      'fixmatch',
      'FixMatch',
      local_training_hparams.LocalFixMatchHparams,
      confidence_threshold=0.3,
    ),
  )
}
