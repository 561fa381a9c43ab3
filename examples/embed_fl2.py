"""(FL)^2 with your own model and data, in TFF's own training loop.

docs/embedding.md explains it. Run: PYTHONPATH=. python examples/embed_fl2.py
"""

import asyncio
import tempfile

import tff_fssl as fssl

# isort: split
import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

SHAPE = (32, 32, 3)
VIEWS = fssl.build_views(SHAPE, mean=[0.5] * 3, std=[0.25] * 3, flip=True)
ROUNDS = fssl.RoundHparams(num_pretraining_rounds=0)


def model_fn():
  """Your Keras model, from images to logits."""
  return tf.keras.applications.MobileNetV2(
    SHAPE, 0.35, weights=None, classes=4, classifier_activation=None
  )


def make_images(num, seed):
  """Replace this by your data: uint8 [num, 32, 32, 3] and int32 [num]."""
  rng = np.random.default_rng(seed)
  y = rng.integers(0, 4, num).astype(np.int32)
  x = 60 * y[:, None, None, None] + rng.integers(0, 60, [num, *SHAPE])
  return x.astype(np.uint8), y


def load_client(round_num, client_id):
  """A client's labelled and unlabelled examples in a round."""
  del round_num  # It has the same in each.
  return None, (make_images(20, seed=1 + client_id)[0], None)


def build_process(rounds=ROUNDS):
  """The `tff.learning.templates.LearningProcess`."""
  return fssl.build_process(
    model_fn,
    fssl.Fl2(round=rounds),
    fssl.DataSpec(
      fssl.element_spec(SHAPE),
      VIEWS,
      fssl.build_server_data_fn(*make_images(20, seed=0)),
    ),
    seed=0,
  )


def train(process, num_rounds, folder):
  """Trains by TFF's program logic; returns the trained Keras model."""
  context = fssl.runtime.build_async_context()
  tff.framework.set_default_context(tff.program.NativeFederatedContext(context))
  released = tff.program.MemoryReleaseManager()
  asyncio.run(
    tff.learning.programs.train_model(
      train_process=process,
      train_data_source=fssl.build_data_source(
        process, load_client, seed=0, num_clients=100, clients_per_round=2
      ),
      train_per_round_clients=2,
      train_total_rounds=num_rounds,
      program_state_manager=tff.program.FileProgramStateManager(folder),
      model_output_manager=released,
      train_metrics_manager=tff.program.LoggingReleaseManager(),
      evaluation_manager=None,
      evaluation_periodicity=num_rounds,
    )
  )
  *_, state = released.values().values()
  fssl.runtime.set_default_context()
  model = model_fn()
  process.get_model_weights(state).assign_weights_to(model)
  return model


if __name__ == '__main__':
  with tempfile.TemporaryDirectory() as temporary:
    trained = train(build_process(), 2, temporary)
  images, labels = make_images(100, seed=0)
  logits = trained.predict(VIEWS.plain(images))
  print('accuracy', np.mean(np.argmax(logits, -1) == labels))
