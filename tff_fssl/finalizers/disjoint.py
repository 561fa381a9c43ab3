"""The server of disjoint learning: sigma is the model, psi a further set."""

from __future__ import annotations

from tff_fssl.finalizers import server_algorithm
from tff_fssl.lazy import tf
from tff_fssl.local import disjoint
from tff_fssl.models import server_model
from tff_fssl.models.weights import Weights

ServerModel = server_model.ServerModel


def weights_of(model: ServerModel, threshold: float) -> Weights:
  """The weights that predict; see `disjoint.summed`."""
  psi = model.sets[disjoint.PSI].trainable
  return disjoint.summed(model.weights, psi, threshold)


def build_prediction(
  threshold: float, *, with_each: bool
) -> server_model.Prediction:
  """Sigma and psi together predict.

  Args:
    threshold: |psi| must be above this; see `disjoint.summed`.
    with_each: Whether `also` has predictions by sigma alone and psi alone, by
      the names of the sets; normalization is that of the sum.

  Returns:
    How the model predicts.
  """

  def of_psi(model: ServerModel) -> Weights:
    nothing = tuple(tf.zeros_like(s) for s in model.trainable)
    sigma = model.weights._replace(trainable=nothing)
    return weights_of(model.with_weights(sigma), threshold)

  each = {
    disjoint.SIGMA: server_model.Prediction(),
    disjoint.PSI: server_model.Prediction(of_psi),
  }
  return server_model.Prediction(
    lambda model: weights_of(model, threshold), also=each if with_each else {}
  )


def build_server(
  psi_factor: float, psi_threshold: float, *, trains: bool
) -> server_algorithm.ServerAlgorithm:
  """The server of FedMatch (Jeong et al. 2021, algorithms 1 and 2).

  Sigma and psi change by the mean changes of clients, sigma by the server's
  optimizer. With labels at the server, sigma then learns from them in the sum
  that predicts, with psi fixed.

  Args:
    psi_factor: psi at the start, as a multiple of sigma.
    psi_threshold: Where it predicts, |psi| must be above this.
    trains: Whether the labels are at the server.

  Returns:
    The server's part.
  """

  def start(weights: Weights) -> ServerModel:
    sigma, psi = disjoint.split(weights, psi_factor)
    return ServerModel(*sigma).with_sets(**{disjoint.PSI: psi})

  def update(
    model: ServerModel,
    aggregated: server_algorithm.Aggregated,
    tools: server_algorithm.ServerTools,
  ) -> ServerModel:
    psi = aggregated.moved(disjoint.PSI, model.sets[disjoint.PSI])
    model = model.with_sets(**{disjoint.PSI: psi})
    model = model.with_weights(tools.apply(model.weights, aggregated.update))
    if not trains:
      return model
    before = weights_of(model, psi_threshold)
    after = tools.train(before)
    sigma = tuple(
      s + (a - b)
      for s, a, b in zip(
        model.trainable, after.trainable, before.trainable, strict=True
      )
    )
    return model.with_weights(after._replace(trainable=sigma))

  return server_algorithm.ServerAlgorithm(start, update)
