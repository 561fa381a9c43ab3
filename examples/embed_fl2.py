"""(FL)^2 with a model and data of one's own, in TFF's own training loop.

docs/embedding.md explains it. Run: PYTHONPATH=. python examples/embed_fl2.py
"""

import asyncio
import functools
import tempfile

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_fssl import runtime
from tff_fssl.algorithms import registry
from tff_fssl.algorithms import round_hparams
from tff_fssl.data import augment
from tff_fssl.data import clients
from tff_fssl.program import sampling

SHAPE, NUM_CLASSES, SEED = (32, 32, 3), 4, 0
VIEWS = augment.build_views(
  SHAPE, mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25), flip=True
)
# Any function that builds a Keras model from images to logits.
model_fn = functools.partial(
  tf.keras.applications.MobileNetV2,
  SHAPE,
  alpha=0.35,
  weights=None,
  classes=NUM_CLASSES,
  classifier_activation=None,
)


def make_images(num, seed):
  """Stands for your data: uint8 [num, 32, 32, 3] and int32 [num]."""
  rng = np.random.default_rng(seed)
  y = rng.integers(0, NUM_CLASSES, num).astype(np.int32)
  x = 60 * y[:, None, None, None] + rng.integers(0, 60, [num, *SHAPE])
  return x.astype(np.uint8), y


def make_client(round_num, client_id):
  """A client's data: unlabelled here, and a seed that is fresh each round."""
  x, _ = make_images(20, seed=1 + client_id)
  element = clients.make_example(
    seed=clients.client_seed(SEED, round_num, client_id),
    labeled=None,
    unlabeled=(x, None),
  )
  return tf.data.Dataset.from_tensors(element)


def build_process(**settings):
  """The `tff.learning.templates.LearningProcess`."""
  fl2 = registry.REGISTRY['fl2']
  return fl2.build(
    model_fn,
    views=VIEWS,
    element_spec=clients.element_spec(SHAPE),
    server_data_fn=clients.build_server_data_fn(*make_images(20, seed=0)),
    round_hparams=round_hparams.RoundHparams(**settings),
    hparams=fl2.hparams(rho=0.1),
    seed=SEED,
    num_classes=NUM_CLASSES,
  )


def train(process, num_rounds, folder):
  """Trains by TFF's program logic; gives a Keras model with the result."""
  source = sampling.CohortDataSource(
    process.next.type_signature.parameter[1],
    make_client,
    seed=SEED,
    num_clients=100,
    clients_per_round=2,
  )
  states = tff.program.MemoryReleaseManager()
  context = runtime.build_async_context('in_process')
  tff.framework.set_default_context(tff.program.NativeFederatedContext(context))
  asyncio.run(
    tff.learning.programs.train_model(
      train_process=process,
      train_data_source=source,
      train_per_round_clients=2,
      train_total_rounds=num_rounds,
      program_state_manager=tff.program.FileProgramStateManager(folder),
      model_output_manager=states,
      train_metrics_manager=tff.program.LoggingReleaseManager(),
      evaluation_manager=None,
      evaluation_periodicity=num_rounds,
    )
  )
  *_, state = states.values().values()
  tff.framework.set_default_context(runtime.build_context('in_process'))
  model = model_fn()
  process.get_model_weights(state).assign_weights_to(model)
  return model


if __name__ == '__main__':
  with tempfile.TemporaryDirectory() as temporary:
    trained = train(build_process(num_pretraining_rounds=0), 2, temporary)
  images, labels = make_images(100, seed=0)
  logits = trained.predict(VIEWS.plain(images))
  print('accuracy', np.mean(np.argmax(logits, -1) == labels))
