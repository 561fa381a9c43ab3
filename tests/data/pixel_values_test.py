import io

import numpy as np
from PIL import Image
import pytest

from tff_fssl import files
from tff_fssl.data import pictures
from tff_fssl.data import pixel_values

_FORM = pictures.Form((4, 4, 1))


@pytest.mark.parametrize(
  'value',
  [
    np.arange(16, dtype=np.int64),
    np.arange(16, dtype=np.uint8).reshape(4, 4),
    np.arange(16, dtype=np.float32).reshape(4, 4, 1) / np.float32(255),
    np.arange(16, dtype=np.float64) / 255,
    pixel_values.of_bytes(bytes(range(16))),
  ],
)
def test_forms_of_the_same_numbers(value):
  picture = pixel_values.read(value, _FORM)
  assert picture.pixels.ravel().tolist() == list(range(16))
  assert picture.stored == (4, 4) and not picture.is_enlarged
  assert pixel_values.stored_shape(value) == (4, 4, 1)


def test_color_and_sizes():
  flat = np.arange(48)
  assert pixel_values.stored_shape(flat) == (4, 4, 3)
  form = pictures.Form((6, 6, 3))
  picture = pixel_values.read(flat, form)
  assert picture.pixels.shape == (6, 6, 3) and picture.is_enlarged


@pytest.mark.parametrize(
  'mode,channels', [('L', 1), ('1', 1), ('RGB', 3), ('LA', 3), ('P', 3)]
)
def test_the_content_of_files(mode, channels):
  file = io.BytesIO()
  Image.new('RGB', (6, 5), 'red').convert(mode).save(file, 'PNG')
  content = file.getvalue()
  assert pixel_values.stored_shape(content) == (5, 6, channels)
  assert pixel_values.read(content, _FORM).stored == (5, 6)
  assert pixel_values.of_bytes(content) is content
  with pytest.raises(files.FileError):
    pixel_values.read(content[:-30], _FORM)


@pytest.mark.parametrize(
  'value',
  [
    np.zeros((4, 4, 2)),
    np.zeros((0, 4)),
    np.zeros(0),
    np.zeros(5),
    np.array(['a'] * 16),
    np.zeros(16, bool),
    np.full(16, 256),
    np.full(16, 1.01),
    np.full(16, np.nan),
    b'',
    b'1234',
    pixel_values.of_bytes(b'12345'),
  ],
)
def test_what_is_no_image(value):
  with pytest.raises(files.FileError) as error:
    pixel_values.read(value, _FORM)
  assert error.value.reason.startswith('it is not an image')
