import io
import os

import numpy as np
from PIL import Image
import pytest

from tff_fssl import files
from tff_fssl.data import pictures

_RGB = pictures.Form((4, 6, 3))
_GRAY = pictures.Form((4, 6, 1))


def _read(image, path, form=_RGB, **saving):
  image.save(path, **saving)
  result = pictures.read(path, form).pixels
  assert result.dtype == np.uint8 and result.shape == form.shape
  return result


def test_an_image_of_the_right_kind_keeps_its_pixels(tmp_path):
  pixels = np.random.default_rng(0).integers(0, 256, (4, 6, 3), np.uint8)
  read = _read(Image.fromarray(pixels), tmp_path / 'a.png')
  np.testing.assert_array_equal(read, pixels)
  read = _read(Image.fromarray(pixels[..., 0]), tmp_path / 'b.png', _GRAY)
  np.testing.assert_array_equal(read[..., 0], pixels[..., 0])


@pytest.mark.parametrize(
  'mode,color,expected,suffix',
  [
    ('1', 1, (255, 255, 255), 'png'),
    ('L', 100, (100, 100, 100), 'png'),
    ('LA', (100, 0), (255, 255, 255), 'png'),
    ('RGBA', (10, 20, 30, 255), (10, 20, 30), 'png'),
    ('RGBA', (10, 20, 30, 0), (255, 255, 255), 'webp'),
    ('CMYK', (0, 255, 255, 0), (255, 0, 0), 'tif'),
    ('I;16', 0x6432, (0x64, 0x64, 0x64), 'png'),
    ('I;16', 0x6432, (0x64, 0x64, 0x64), 'tif'),
  ],
)
def test_modes(tmp_path, mode, color, expected, suffix):
  image = Image.new(mode, (6, 4), color)
  read = _read(image, tmp_path / f'a.{suffix}', lossless=True)
  assert np.abs(read.astype(int) - expected).max() <= 2


def test_palettes(tmp_path):
  image = Image.new('P', (6, 4), 1)
  image.putpalette([9, 9, 9, 200, 100, 50])
  assert _read(image, tmp_path / 'a.png')[0, 0].tolist() == [200, 100, 50]
  read = _read(image, tmp_path / 'b.png', transparency=1)
  assert read[0, 0].tolist() == [255, 255, 255]


def test_16_bit_pgm(tmp_path):
  (tmp_path / 'a.pgm').write_bytes(b'P5 6 4 65535\n' + b'\x64\x32' * 24)
  read = pictures.read(tmp_path / 'a.pgm', _GRAY)
  assert (read.pixels == 0x64).all()


def test_first_frame_of_an_animation(tmp_path):
  red, blue = (Image.new('RGB', (6, 4), c) for c in ('red', 'blue'))
  read = _read(red, tmp_path / 'a.gif', save_all=True, append_images=[blue])
  assert read[0, 0].tolist() == [255, 0, 0]


def test_exif_orientation_is_applied(tmp_path):
  image = Image.new('RGB', (40, 60), 'black')
  image.paste('white', (0, 0, 40, 30))  # The upper half.
  exif = Image.Exif()
  exif[0x0112] = 6  # Turn clockwise.
  read = _read(image, tmp_path / 'a.jpg', exif=exif, quality=95)
  assert (read[:, :2] < 9).all() and (read[:, 4:] > 246).all()


def test_crop_and_squash(tmp_path):
  image = Image.new('RGB', (60, 20), 'black')
  image.paste('white', (15, 0, 45, 20))  # The middle, 30 x 20.
  form = pictures.Form((10, 15, 3))
  assert _read(image, tmp_path / 'a.png', form).min() > 230
  squashed = pictures.Form((10, 15, 3), 'squash')
  read = _read(image, tmp_path / 'b.png', squashed)
  assert read[5, 0, 0] == read[5, 14, 0] == 0 and read[5, 7, 0] == 255


def test_large_jpeg_is_as_if_decoded_whole(tmp_path):
  ramp = np.linspace(0, 255, 640, dtype=np.uint8)
  pixels = np.broadcast_to(ramp[:, None], (640, 640, 3)[:2])
  read = _read(
    Image.fromarray(np.stack([pixels] * 3, -1)),
    tmp_path / 'a.jpg',
    pictures.Form((8, 8, 3)),
  )
  expected = pixels.reshape(8, 80, 8, 80).mean((1, 3))
  assert np.abs(read[..., 0] - expected).max() < 8


def test_floats_from_0_to_1_are_scaled(tmp_path):
  Image.new('F', (6, 4), 0.5).save(tmp_path / 'a.tif')
  assert (pictures.read(tmp_path / 'a.tif', _RGB).pixels == 128).all()


def test_used_bits_of_16(tmp_path):
  values = np.full((4, 6), 2_048, np.uint16)
  values[0, 0] = 4_095
  Image.fromarray(values).save(tmp_path / 'a.png')
  for depth, expected in ((16, 8), (12, 128), (8, 255)):
    form = pictures.Form((4, 6, 1), depth=depth)
    found = pictures.read(tmp_path / 'a.png', form)
    assert found.depth == 12 and found.pixels[1, 1, 0] == expected


def test_large_images_are_refused_unless_a_flag_allows_them(tmp_path):
  Image.new('1', (1_500, 1_000)).save(tmp_path / 'a.png')
  with pictures.quiet(2):
    assert pictures.read(tmp_path / 'a.png', _RGB).stored == (1_000, 1_500)
  with pictures.quiet(1):
    with pytest.raises(files.FileError, match='--max_megapixels allows more'):
      pictures.read(tmp_path / 'a.png', _RGB)
  assert pictures.read(tmp_path / 'a.png', _RGB).depth == 0


def test_files_of_several_pages(tmp_path):
  page = Image.new('L', (6, 4), 7)
  page.save(tmp_path / 'one.tif')
  page.save(tmp_path / 'two.tif', save_all=True, append_images=[page])
  for name, is_stack in (('one.tif', False), ('two.tif', True)):
    assert pictures.read(tmp_path / name, _RGB).is_stack == is_stack


def test_what_is_no_image_is_refused(tmp_path):
  good = tmp_path / 'good.png'
  Image.new('RGB', (64, 64), 'red').save(good)
  torn = tmp_path / 'torn.png'
  torn.write_bytes(good.read_bytes()[:60])
  (tmp_path / 'text.jpg').write_text('not an image')
  (tmp_path / 'empty.png').write_bytes(b'')
  os.mkfifo(tmp_path / 'pipe.png')
  Image.new('F', (6, 4), 3.0).save(tmp_path / 'floats.tif')
  Image.new('I', (6, 4)).save(tmp_path / 'integers.tif')
  for name, words in (
    ('torn.png', 'not a readable image'),
    ('text.jpg', 'of no known format'),
    ('empty.png', 'of no known format'),
    ('pipe.png', 'not a regular file'),
    ('missing.png', 'does not exist'),
    ('floats.tif', 'floats must be from 0 to 1'),
    ('integers.tif', 'integers of 32 bits'),
  ):
    with pytest.raises(files.FileError, match=words) as error:
      pictures.read(tmp_path / name, _RGB)
    assert '\n' not in str(error.value)


def test_arrays_are_converted_as_files_are():
  pixels = np.full((8, 12, 4), 200, np.uint8)
  pixels[..., 3] = 255
  assert pictures.convert(pixels, _RGB).tolist() == [[[200] * 3] * 6] * 4
  assert pictures.convert(pixels[..., :1], _GRAY).shape == (4, 6, 1)
  with pytest.raises(ValueError, match='float64'):
    pictures.convert(np.zeros((3, 3, 3)), _RGB)


def test_names_of_images():
  assert pictures.is_image('a/b.JPEG') and pictures.is_image('x.webp')
  assert not pictures.is_image('b.txt') and not pictures.is_image('jpg')


@pytest.mark.parametrize('suffix', ['png', 'jpg'])
def test_stored_sizes(tmp_path, suffix):
  path = tmp_path / f'a.{suffix}'
  Image.new('RGB', (600, 40)).save(path)
  for shape, is_enlarged in (
    ((40, 60, 3), False),
    ((41, 60, 3), True),
    ((4, 4, 3), False),
    ((4, 601, 3), True),
  ):
    read = pictures.read(path, pictures.Form(shape))
    assert (read.stored, read.is_enlarged) == ((40, 600), is_enlarged)


_FORM = pictures.Form((4, 4, 1))


@pytest.mark.parametrize(
  'value',
  [
    np.arange(16, dtype=np.int64),
    np.arange(16, dtype=np.uint8).reshape(4, 4),
    np.arange(16, dtype=np.float32).reshape(4, 4, 1) / np.float32(255),
    np.arange(16, dtype=np.float64) / 255,
    pictures.parse_bytes(bytes(range(16))),
  ],
)
def test_forms_of_the_same_numbers(value):
  picture = pictures.read(value, _FORM)
  assert picture.pixels.ravel().tolist() == list(range(16))
  assert picture.stored == (4, 4) and not picture.is_enlarged
  assert pictures.stored_shape(value) == (4, 4, 1)


def test_color_and_sizes():
  flat = np.arange(48)
  assert pictures.stored_shape(flat) == (4, 4, 3)
  form = pictures.Form((6, 6, 3))
  picture = pictures.read(flat, form)
  assert picture.pixels.shape == (6, 6, 3) and picture.is_enlarged


@pytest.mark.parametrize(
  'mode,channels', [('L', 1), ('1', 1), ('RGB', 3), ('LA', 3), ('P', 3)]
)
def test_the_content_of_files(mode, channels):
  file = io.BytesIO()
  Image.new('RGB', (6, 5), 'red').convert(mode).save(file, 'PNG')
  content = file.getvalue()
  assert pictures.stored_shape(content) == (5, 6, channels)
  assert pictures.read(content, _FORM).stored == (5, 6)
  assert pictures.parse_bytes(content) is content
  with pytest.raises(files.FileError):
    pictures.read(content[:-30], _FORM)


def test_a_text_is_no_path(tmp_path):
  path = tmp_path / 'secret.png'
  Image.new('RGB', (6, 4)).save(path)
  with pytest.raises(files.FileError, match='it is not a readable image'):
    pictures.read(str(path), _RGB)


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
    pictures.parse_bytes(b'12345'),
  ],
)
def test_what_is_no_image(value):
  with pytest.raises(files.FileError) as error:
    pictures.read(value, _FORM)
  assert error.value.reason.startswith('it is not a readable image')
