"""ProtoFSSL: pseudo-labels by other clients' prototypes. Labels at clients.

Kim, Park, Sohn, Shu and Kim, "Federated Semi-Supervised Learning with
Prototypical Networks", arXiv 2022 (2205.13921). The authors' code:
github.com/kimwj94/ProtoFSSL.

The network has no classifier: it gives embeddings. A prototype is the mean
embedding of a class, and softmax(-distances from prototypes) a prediction.

In a round:
1.  The server sends the network, and the prototypes of clients of the round
    before (helpers), the same to all; with `--protofssl.helper_interval` R_H,
    new ones in rounds 1, 1 + R_H, ... only, and the same again in the others.
2.  For each of E episodes (`--client_epochs`), a client draws n_S support and
    n_Q query examples of each of its classes and n_QU unlabelled ones
    (`--client_batch_size`), and embeds all of them, not augmented, in one pass.
    Its own prototypes are those of the support examples.
3.  It makes a step on L = CE(label, own prediction), mean over query examples,
    + lambda_U CE(p, own prediction), mean over unlabelled examples; p is the
    mean of the helpers' predictions, sharpened. Before there are prototypes,
    the second term, and the unlabelled examples, are left out.
4.  It sends the change of the network, and prototypes of all its labelled
    examples by the network as it is now.
5.  The server averages the changes, and keeps the prototypes in place of those
    of the round before. The mean prediction by them is that of the model.

Where paper (P) and code (C) differ; docs/algorithms/protofssl.md says why:
1   Distance: Euclidean (P); squared, mean over dimensions (C): the default,
    `--protofssl.distance`.
2   p is a label (P): the default; gradients flow through it (C):
    `--protofssl.stop_gradient=false`.
3,4 FedProx and L2 have no gradient in C. Here they have:
    `--proximal_strength`, `--weight_decay`.
5   Clients are weighed by examples (P) (`--client_weighting=examples`) or
    equally (C): the default.
6   sBN is static batch norm (P), as here; batch norm without memory (C).
7   Convolutions have no biases (P), as here; they do (C).
10  RMSprop starts anew in each round; in C, all clients share its memory.
12  A class that a client lacks is left out of the softmax; its distance is 1e18
    in C. A helper that lacks it takes the mean of the other helpers. Where the
    model predicts, these are of the last cohort; in C of the last two.

`--protofssl.support=global` is the ablation of P's appendix B.1: the prototypes
of step 2 are the mean of the helpers', and support examples are queries, too.

`--protofssl.prototypes=global` is ours (section 8 of the FedSwitch spec): one
helper, whose prototypes are those of all clients' labelled examples together.
"""

from __future__ import annotations

from collections.abc import Mapping
import functools
from typing import Any

from tff_fssl.algorithms import protofssl_hparams
from tff_fssl.data import augment
from tff_fssl.lazy import tf
from tff_fssl.local import algorithm as algorithm_lib
from tff_fssl.local import objective
from tff_fssl.local import terms
from tff_fssl.models import server_model
from tff_fssl.rounds import exchange as exchange_lib
from tff_fssl.rounds import prototype_sets
from tff_fssl.rounds import round_hparams as round_hparams_lib
from tff_fssl.semisup import prototypes as prototypes_lib

ProtoFsslHparams = protofssl_hparams.ProtoFsslHparams
RoundHparams = round_hparams_lib.RoundHparams
_SUPPORT, _QUERY = 0, 1
_OF_HELPERS = terms.PROTOTYPE_LABEL_RATIOS


def _minimize(
  hparams: ProtoFsslHparams,
  networks: algorithm_lib.Networks,
  batch: algorithm_lib.Batch,
  with_helpers: bool,
) -> tuple[list[tf.Tensor], dict[str, algorithm_lib.Ratio]]:
  """Gradients of the loss, and metrics: steps 2 and 3."""
  labeled = batch.parts[objective.LABELED]
  unlabeled = batch.parts[objective.UNLABELED]
  images, num_labeled = labeled.views['plain'], tf.size(labeled.labels)
  if with_helpers:
    images = tf.concat([images, unlabeled.views['plain']], axis=0)
  num_classes = batch.constants['prototypes'].shape[1]
  in_support, in_query = (
    tf.cast(tf.equal(labeled.group, group), tf.float32) * labeled.weights
    for group in (_SUPPORT, _QUERY)
  )
  with tf.GradientTape() as tape:
    embeddings = networks.local.logits(images, training=True)
    own, exists = prototypes_lib.class_means(
      embeddings[:num_labeled], labeled.labels, in_support, num_classes
    )
    if hparams.support == protofssl_hparams.GLOBAL:
      is_helped = tf.gather(batch.constants['exists'], labeled.labels)
      in_query += in_support * tf.cast(is_helped, tf.float32)
      own, exists = prototypes_lib.replaced(own, exists, **batch.constants)
    logs = prototypes_lib.log_probs(embeddings, own, exists, hparams.distance)
    of_query = labeled._replace(weights=in_query)
    loss, ratios = objective.labeled_loss(logs[:num_labeled], of_query)
    if with_helpers:
      of_helpers, more = terms.prototype_label_loss(
        embeddings[num_labeled:],
        logs[num_labeled:],
        unlabeled,
        batch.constants,
        distance=hparams.distance,
        temperature=hparams.temperature,
        stop_gradient=hparams.stop_gradient,
      )
      loss += hparams.unlabeled_loss_weight * of_helpers
    else:
      more = {n: algorithm_lib.ratio(0.0, 0.0) for n in _OF_HELPERS}
  return networks.local.gradients(tape, loss), {**ratios, **more}


def build_local_algorithm(
  hparams: ProtoFsslHparams, round_hparams: RoundHparams
) -> algorithm_lib.LocalAlgorithm:
  """The clients' part: steps 2 to 4."""

  def prepare(
    networks: algorithm_lib.Networks,
    data: algorithm_lib.ClientData,
    views: augment.Views,
  ) -> algorithm_lib.Prepared:
    del networks, views
    sets = prototype_sets.completed(data.received)
    return algorithm_lib.Prepared(
      tf.range(tf.shape(data.unlabeled.x)[0]), constants=sets
    )

  def step(
    networks: algorithm_lib.Networks, batch: algorithm_lib.Batch
  ) -> algorithm_lib.StepResult:
    with_helpers = tf.logical_and(
      tf.reduce_any(batch.constants['used'] > 0.0),
      tf.reduce_any(batch.parts[objective.UNLABELED].weights > 0.0),
    )
    minimize = functools.partial(_minimize, hparams, networks, batch)
    return algorithm_lib.StepResult(
      *tf.cond(with_helpers, lambda: minimize(True), lambda: minimize(False))
    )

  def finish(
    networks: algorithm_lib.Networks,
    data: algorithm_lib.ClientData,
    views: augment.Views,
    ratios: Mapping[str, algorithm_lib.Ratio],
  ) -> algorithm_lib.Finished:
    del ratios
    sums, counts = prototype_sets.client_sums(
      networks.local, data, views, round_hparams.statistics_batch_size
    )
    if not hparams.sends_rows:
      row = prototype_sets.sum_row(sums, counts, hparams.sum_norm)
      return algorithm_lib.Finished(row=row)
    own, exists = prototypes_lib.means(sums, counts)
    own = prototypes_lib.noised(own, exists, hparams.prototype_noise, data.seed)
    return algorithm_lib.Finished(row={'prototypes': own, 'exists': exists})

  groups = (hparams.num_support, hparams.num_query)
  stream = algorithm_lib.Stream({'plain': 'plain'})
  return algorithm_lib.LocalAlgorithm(
    steps=(step,),
    step_ratios=(*objective.LABELED_RATIOS, *_OF_HELPERS),
    streams={
      objective.LABELED: stream._replace(labeled=True, episode=groups),
      objective.UNLABELED: stream._replace(episode=()),
    },
    prepare=prepare,
    finish=finish,
  )


def build_exchange(
  hparams: ProtoFsslHparams, round_hparams: RoundHparams
) -> exchange_lib.BuildExchange:
  """The prototypes that the server keeps and sends: steps 1 and 5."""
  if hparams.sends_rows:
    return functools.partial(
      prototype_sets.build_list,
      num_sets=hparams.num_helpers,
      interval=hparams.helper_interval,
    )
  return functools.partial(
    prototype_sets.build_global,
    norm=hparams.sum_norm,
    max_examples=round_hparams.most_client_examples,
  )


def build_prediction(
  hparams: ProtoFsslHparams, round_hparams: RoundHparams
) -> server_model.Prediction:
  """The mean prediction by all sets of prototypes: step 5."""
  del round_hparams
  return prototype_sets.build_prediction(hparams.num_sets, hparams.distance)


def build_embeds(hparams: Any, round_hparams: Any) -> bool:
  """`parts.Parts.embeds`: networks have no classifier."""
  del hparams, round_hparams
  return True
