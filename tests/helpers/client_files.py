"""Small files of TFF's `ClientData`, written as TFF and TensorFlow do."""

from collections.abc import Mapping, Sequence
import pathlib
import sqlite3
from typing import Any

import numpy as np
import tensorflow as tf

# Client -> (pixels float32 [N, 5, 5] in [0, 1], labels int64 [N]).
Clients = Mapping[str, tuple[np.ndarray, np.ndarray]]


def draw(counts: Mapping[str, int], seed: int = 0) -> Clients:
  """Random pixels; classes 0 and 1 in turn."""
  rng = np.random.default_rng(seed)
  return {
    name: (rng.random((n, 5, 5), np.float32), np.arange(n) % 2)
    for name, n in counts.items()
  }


def example(**features: Any) -> bytes:
  """A serialized `tf.train.Example`."""
  made = {}
  for name, value in features.items():
    if isinstance(value, bytes):
      kind = {'bytes_list': tf.train.BytesList(value=[value])}
    elif np.issubdtype(np.asarray(value).dtype, np.floating):
      kind = {'float_list': tf.train.FloatList(value=np.ravel(value))}
    else:
      kind = {'int64_list': tf.train.Int64List(value=np.ravel(value))}
    made[name] = tf.train.Feature(**kind)
  return tf.train.Example(
    features=tf.train.Features(feature=made)
  ).SerializeToString()


def examples(clients: Clients) -> dict[str, list[bytes]]:
  """Client -> its examples, with TFF's names of EMNIST's features."""
  return {
    name: [example(pixels=p, label=c) for p, c in zip(x, y)]
    for name, (x, y) in clients.items()
  }


def sqlite(
  path: pathlib.Path, splits: Mapping[str, Mapping[str, Sequence[Any]]]
) -> None:
  """Writes split -> client -> examples, mixed, in TFF's schema."""
  rows = [
    (number, split, client, content)
    for split, clients in splits.items()
    for client, contents in clients.items()
    for number, content in enumerate(contents)
  ]
  with sqlite3.connect(path) as connection:
    connection.execute(
      'CREATE TABLE examples (split_name TEXT NOT NULL, client_id TEXT NOT'
      ' NULL, serialized_example_proto BLOB NOT NULL)'
    )
    connection.execute(
      'CREATE TABLE client_metadata (client_id TEXT NOT NULL, split_name TEXT'
      ' NOT NULL, num_examples INTEGER NOT NULL)'
    )
    connection.executemany(
      'INSERT INTO examples VALUES (?, ?, ?)',
      [row[1:] for row in sorted(rows, key=lambda row: row[0])],
    )
    connection.executemany(
      'INSERT INTO client_metadata VALUES (?, ?, ?)',
      [
        (client, split, len(contents))
        for split, clients in splits.items()
        for client, contents in clients.items()
      ],
    )
  connection.close()


def train_and_test(
  path: pathlib.Path, train: Clients, test: Clients | None = None
) -> None:
  """Writes both splits, of the same clients unless others are given."""
  splits = {'train': train, 'test': train if test is None else test}
  sqlite(path, {split: examples(drawn) for split, drawn in splits.items()})
