"""Inference over a client's data."""

from __future__ import annotations

from collections.abc import Callable

from tff_fssl import loops
from tff_fssl import seeds
from tff_fssl.data import augment
from tff_fssl.lazy import tf
from tff_fssl.models import adapter


def num_batches(
  size: int | tf.Tensor, batch_size: int | tf.Tensor
) -> int | tf.Tensor:
  """Counts the batches of `size` examples. The last one may be smaller."""
  return -(-size // batch_size)


def zero_row(values: tf.Tensor, when: tf.Tensor) -> tf.Tensor:
  """Prepends a row of zeros if `when` is true."""
  pad = [[tf.cast(when, tf.int32), 0]] + [[0, 0]] * (values.shape.rank - 1)
  return tf.pad(values, pad)


def weak_logits(
  network: adapter.Network,
  images: tf.Tensor,
  views: augment.Views,
  seed: tf.Tensor,
  batch_size: int,
  *,
  own_moments: bool = False,
) -> tf.Tensor:
  """Computes logits of one weak view of every image, in inference mode.

  Args:
    network: The network, with its weights.
    images: [N, ...] as stored, N >= 0.
    views: The preprocessing.
    seed: int32 [2], seed of the views.
    batch_size: Images in a batch.
    own_moments: See `outputs`.

  Returns:
    float32 [N, C].
  """
  return outputs(
    network,
    images,
    lambda batch, i: views.weak(batch, seeds.fold_in(seed, i)),
    batch_size,
    own_moments=own_moments,
  )


def outputs(
  network: adapter.Network,
  images: tf.Tensor,
  make_view: Callable[[tf.Tensor, tf.Tensor], tf.Tensor],
  batch_size: int,
  *,
  own_moments: bool = False,
) -> tf.Tensor:
  """Computes the network's outputs for every image, in inference mode.

  Args:
    network: The network, with its weights.
    images: [N, ...] as stored, N >= 0.
    make_view: (stored images, number of the batch) -> the network's inputs.
    batch_size: Images in a batch.
    own_moments: Whether batch norm takes the moments of each batch. It does not
      for a single image, whose own moments would normalize it to 0.

  Returns:
    float32 [N, C].
  """
  num_images = tf.shape(images)[0]
  by_batch = num_images > 1 if own_moments else None
  # TF's convolutions fail on 0 images. A blank image stands in, and its outputs
  # are cut off below.
  images = zero_row(images, tf.equal(num_images, 0))
  size = tf.shape(images)[0]
  results = tf.TensorArray(
    tf.float32,
    loops.num_batches(size, batch_size),
    # The last batch may be smaller, so the first dimension is not inferred.
    infer_shape=False,
    element_shape=[None, network.num_outputs],
  )

  def infer(
    i: tf.Tensor, rows: slice, results: tf.TensorArray
  ) -> tf.TensorArray:
    batch = make_view(images[rows], i)
    logits = network.inference_logits(batch, by_batch)
    return results.write(i, logits)

  results = loops.fold_batches(infer, results, size=size, batch_size=batch_size)
  return results.concat()[:num_images]


def plain_probs(
  network: adapter.Network,
  images: tf.Tensor,
  views: augment.Views,
  batch_size: int,
) -> tf.Tensor:
  """Predicts images without augmentation.

  Args:
    network: The network, with its weights.
    images: [N, ...] as stored, N >= 0.
    views: The preprocessing.
    batch_size: Images in a batch.

  Returns:
    Probabilities, float32 [N, C].
  """
  logits = outputs(
    network,
    images,
    lambda batch, i: views.plain(batch),
    batch_size,
  )
  return tf.nn.softmax(logits)
