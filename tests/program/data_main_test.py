import shutil

import client_files
import hub_files
import picture_folders
from PIL import Image
import pytest
import tiny_tfds

from tff_fssl.data.sources import idx
from tff_fssl.program import data_main
from tff_fssl.program import main


@pytest.fixture(name='shown')
def _shown(capsys, tmp_path, monkeypatch):
  """Calls the program: its exit code and its output, 80 columns wide."""
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  # As on a machine without Debian's package.
  monkeypatch.setattr(idx, 'FASHION_MNIST', str(tmp_path / 'none'))
  monkeypatch.chdir(tmp_path)

  def shown(*argv):
    code = main.run(data_main.data_main, argv)
    captured = capsys.readouterr()
    return code, captured.out + captured.err

  return shown


def test_overview(shown, tmp_path):
  tiny_tfds.write(
    tmp_path, 'leaves', {'train': 3, 'test': 3}, num_classes=3, shape=(6, 5, 1)
  )
  tiny_tfds.write(
    tmp_path, 'broken', {'train': 3}, num_classes=3, shape=(6, 5, 1)
  )
  (tmp_path / 'broken/1.0.0/features.json').write_text('{')
  tiny_tfds.write(tmp_path, 'cifar10', {'train': 20, 'test': 10})
  code, text = shown(f'--data_dir={tmp_path}')
  assert code == 0
  words = ' '.join(text.split())
  for line in (
    'cifar10 50,000 training and 10,000 test images, 32 x 32 x 3, 10 classes c',
    '28 x 28 x 1, 10 classes; not there digits',
    'leaves 3 training and 3 test images, 6 x 5 x 1, 3 classes',
    'broken cannot be used: ',
  ):
    assert line in words
  assert 'data.py folder:PATH' in text


def test_a_sound_folder(shown, tmp_path):
  picture_folders.class_folders(
    tmp_path / 'photos',
    {'train/cat': 9, 'train/dog': 6, 'test/cat': 3, 'test/dog': 3},
  )
  code, text = shown('folder:photos', '--image_size=6')
  assert code == 0
  # A long path is not broken.
  lines = [line for line in text.splitlines() if str(tmp_path) not in line]
  assert max(map(len, lines)) <= 80
  for words in (
    'by class folders',
    '15 for training, 6 for testing, 6 x 6 x 3',
    '  cat           9     3\n  dog           6     3\n',
    'OK. Train with --dataset=folder:photos',
  ):
    assert words in text
  assert 'continues' not in text
  _, again = shown('folder:photos', '--image_size=6')
  assert again == text
  (tmp_path / 'photos/train/cat/0.png').unlink()
  _, changed = shown('folder:photos', '--image_size=6')
  sums = [
    line for t in (text, changed) for line in t.splitlines() if 'sha256' in line
  ]
  assert len(set(sums)) == 2


def test_a_folder_with_clients(shown, tmp_path):
  picture_folders.manifest(
    tmp_path / 'photos',
    [
      'path,label,client,split',
      *(f'{i}.png,{"ab"[i % 2]},c{i // 4},train' for i in range(6)),
      *('6.png,,c1,train', '7.png,,,train', '8.png,a,,test', '9.png,b,,test'),
    ],
  )
  code, text = shown('folder:photos', '--image_size=7')
  assert code == 0
  assert '8 for training (2 without a label), 2 for testing' in text
  assert '2, of 3 to 4 images; 1 are of nobody' in text


def test_problems_of_a_folder(shown, tmp_path):
  root = tmp_path / 'photos'
  picture_folders.class_folders(
    root, {'train/cat': 9, 'train/dog': 6, 'test/cat': 3, 'test/owl': 3}
  )
  code, text = shown('folder:photos')
  assert code == 1
  assert 'stops training: classes without a training example: owl' in text
  assert 'training continues: classes without a test example: dog; ' in text
  assert '  owl           0     3' in text
  shutil.move(root / 'test/owl', root / 'test/dog')
  (root / 'train/cat/1.jpg').write_text('no image')
  (root / 'train/notes.txt').write_text('')
  (root / 'train/cat/notes.txt').write_text('')
  shutil.copy(root / 'train/cat/0.png', root / 'train/cat/again.png')
  shutil.copy(root / 'train/cat/0.png', root / 'test/cat/again.png')
  shutil.copy(root / 'train/dog/0.png', root / 'train/cat/dog.png')
  code, text = shown('folder:photos')
  assert code == 1
  for words in (
    'training continues: 1 files are left out, since Pillow reads no such'
    ' ending (1 .txt)',
    'training continues: 23 images are smaller than 32 x 32, and are enlarged',
    'stops training: 1 images cannot be read (train/cat/1.jpg: it is not a',
    '--max_unreadable=1\n  train/cat/1.jpg: it is not',
    '2 training examples repeat another one, by their content:'
    ' train/cat/again.png = train/cat/0.png,'
    ' train/dog/0.png = train/cat/dog.png',
    '1 test examples are for training, too, by their content:'
    ' test/cat/again.png = train/cat/0.png',
    '1 examples repeat one that has another class, by their content:'
    ' train/dog/0.png = train/cat/dog.png',
  ):
    assert words in text
  code, text = shown('folder:photos', '--max_unreadable=1')
  assert code == 1 and '--accept_findings' in text
  code, text = shown('folder:photos', '--max_unreadable=1', '--accept_findings')
  assert code == 0
  assert 'training continues: 1 images cannot be read (train/cat/1' in text
  assert '; they are skipped' in text


def test_what_is_not_used_or_gives_a_class_away(shown, tmp_path):
  root = tmp_path / 'photos'
  folders = {f'{s}/{c}': 20 for s in ('train', 'test') for c in 'ab'}
  picture_folders.class_folders(root, folders)
  picture_folders.class_folders(
    root, {'train/b/2023': 7, 'valid/a': 3, 'train/c': 0}
  )
  picture_folders.draw(root / 'train/stray.png', 1)
  code, text = shown('folder:photos', '--image_size=6')
  assert code == 0
  lines = text.splitlines()
  assert (
    'training continues: 11 image files are not used (1 in train, 7 in'
    ' train/b/2023, 3 in valid/a): only images directly in a class folder are'
    ' read; move them, or, if these are clients, move their folders into'
    ' clients/'
  ) in lines
  assert (
    'training continues: class folders without an image: c; they are ignored,'
    ' and the network has 2 outputs'
  ) in lines
  assert 'can tell' not in text
  # Half of a class is gray; the other is of PNG files of one size.
  for path in sorted((root / 'train/a').iterdir())[:10]:
    with Image.open(path) as image:
      image.convert('L').convert('RGB').save(path)
  for number, path in enumerate(sorted((root / 'train/b').glob('*.*'))):
    path.unlink()
    picture_folders.draw(root / f'train/b/new{number}.png', 100 + number)
  code, text = shown('folder:photos', '--image_size=6')
  assert code == 0
  for words in (
    'training continues: 50% of a and 0% of the others are gray: a network can'
    ' tell classes by that',
    '100% of b and 35% of the others are PNG files: ',
    '100% of b and 0% of the others are 9 x 7 in their files: ',
  ):
    assert words in text


def test_a_manifest_that_does_not_name_all(shown, tmp_path):
  picture_folders.manifest(
    tmp_path / 'photos',
    [
      'path,label,split',
      *(
        f'{i}.png,{"ab"[i % 2]},{"train" if i < 6 else "test"}'
        for i in range(8)
      ),
    ],
  )
  code, text = shown('folder:photos', '--image_size=7')
  assert code == 0
  assert '4 image files are not used (4 in .): manifest.csv does not' in text


def test_a_tfds_set(shown, tmp_path):
  tiny_tfds.write(
    tmp_path, 'leaves', {'train': 8, 'test': 6}, num_classes=3, shape=(6, 5, 1)
  )
  code, text = shown('leaves', f'--data_dir={tmp_path}', '--image_size=4')
  assert code == 0 and '8 for training, 6 for testing, 4 x 4 x 1' in text
  (tmp_path / 'leaves/1.0.0/features.json').write_text('{')
  code, text = shown('leaves', f'--data_dir={tmp_path}')
  assert code == 2 and 'cannot be read (FileError: ' in text


def test_many_classes_are_shortened(shown, tmp_path):
  tiny_tfds.write(
    tmp_path,
    'letters',
    {'train': 70, 'test': 60},
    num_classes=60,
    shape=(4, 4, 1),
  )
  code, text = shown('letters', f'--data_dir={tmp_path}')
  assert code == 0
  assert '... and 40 more; classes have 1 to 2 training examples' in text


def test_what_is_not_there(shown, tmp_path):
  code, text = shown('cifar100', f'--data_dir={tmp_path}')
  assert code == 1
  assert f"tfds.load('cifar100', data_dir='{tmp_path}')\"\n" in text
  assert f'stops training: cifar100 is not in --data_dir={tmp_path}' in text
  for argv, words in (
    (['cifar11'], "did you mean 'cifar10'"),
    (['folder:none'], 'it does not exist'),
    (['digits', 'cifar10'], 'give one name only'),
  ):
    code, text = shown(*argv)
    assert code == 2 and words in text and len(text.splitlines()) == 1


def test_digits(shown):
  code, text = shown('digits')
  assert code == 0 and '1,437 for training, 360 for testing' in text


def test_removing_caches(shown, tmp_path):
  code, text = shown('--remove_caches')
  assert (code, text) == (
    0,
    f'Decoded images in {tmp_path}/cache/tff_fssl: none\n',
  )
  picture_folders.class_folders(
    tmp_path / 'photos', {'train/a': 3, 'train/b': 3, 'test/a': 2, 'test/b': 2}
  )
  shown('folder:photos', '--image_size=6')
  shown('folder:photos', '--image_size=7')
  code, text = shown('folder:photos', '--remove_caches')
  assert code == 2 and 'omit the name' in text
  code, text = shown('--remove_caches')
  assert code == 0
  assert '10 images of 6 x 6 x 3, ' in text and '7 x 7 x 3' in text
  assert 'Removed: 2, of ' in text
  assert max(map(len, text.splitlines()[1:])) <= 80
  code, text = shown('--remove_caches')
  assert text.endswith(': none\n')


def test_client_data(shown, tmp_path):
  clients = client_files.draw({'ann': 5, 'bob': 3})
  test = client_files.draw({'ann': 4}, 1)
  client_files.train_and_test(tmp_path / 'x', clients, test)
  code, text = shown('clientdata:x')
  words = ' '.join(text.split())
  assert code == 0, text
  assert 'clients 2, of 3 to 5 images' in words and 'stored 5 x 5 w' in words
  assert 'OK. Train with --dataset=clientdata:x' in words
  clients['bob'][0][1] = 2
  (tmp_path / 'x').unlink()
  client_files.train_and_test(tmp_path / 'x', clients, test)
  code, text = shown('clientdata:x')
  assert code == 1
  assert '(train bob/1: it is not a readable image' in text


def test_a_set_of_the_hub(shown, tmp_path):
  code, text = shown('huggingface:me/pets', f'--data_dir={tmp_path}')
  assert code == 1
  command = 'hf download me/pets --repo-type=dataset --local-dir='
  assert f'\n  {command}{tmp_path}/me/pets\n' in text
  assert f'huggingface:me/pets is not in --data_dir={tmp_path}\n' in text
  for seed, split in enumerate(('train', 'test')):
    hub_files.write(
      tmp_path / f'me/pets/data/{split}-00000-of-00001.parquet',
      {'image': hub_files.images(6, seed), 'label': [0, 1] * 3},
    )
  code, text = shown('huggingface:me/pets', f'--data_dir={tmp_path}')
  assert code == 0
  assert '6 for training, 6 for testing, 5 x 6 x 1' in text
  assert '  cat           3     3\n  dog           3     3\n' in text


def test_folders_with_a_server(shown, tmp_path):
  folders = {f'{name}/{c}': 3 for name in ('server', 'test') for c in 'ab'}
  picture_folders.class_folders(tmp_path / 'photos', folders)
  code, text = shown('folder:photos', '--image_size=6')
  assert code == 1 and 'only deploy takes the data' in text
  picture_folders.class_folders(tmp_path / 'photos', {'clients/north/a': 2})
  _, text = shown('folder:photos', '--image_size=6')
  words = ' '.join(text.split())
  assert '6 of them, 6 with a label: with --scenario=labels_at_server' in words
  assert 'only deploy takes the data' not in words and 'of nobody' not in words
