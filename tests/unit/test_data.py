import os
import pickle

import numpy as np
import pytest
import torch
from PIL import Image

from onecrop.data import Loader, load
from onecrop.data.cifar import LAYOUTS
from onecrop.data.images import ImageSet
from onecrop.data.shapes import shapes
from onecrop.data.sources import Request, load_labelled
from onecrop.errors import UserError

RNG = np.random.default_rng(0)


def write_images(folder, count=3, size=(20, 10), suffix=".png", seed=0):
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    for i in range(count):
        Image.fromarray(rng.integers(0, 255, (size[1], size[0], 3), np.uint8)).save(folder / f"picture {i}é{suffix}")


def test_shapes_are_a_function_of_their_seed():
    a, b, c = shapes(300, 16, seed=1), shapes(300, 16, seed=1), shapes(300, 16, seed=2)
    assert np.array_equal(a.images, b.images)
    assert np.array_equal(a.labels, b.labels)
    assert a.fingerprint == b.fingerprint != c.fingerprint
    assert a.images.shape == (300, 3, 16, 16)
    assert set(a.labels) == set(range(10))
    assert len(np.unique(a.images, axis=0)) == 300


def test_shapes_come_in_any_count_and_size():
    assert len(load("shapes", request=Request(subset=70))) == 70
    assert load("shapes", request=Request(subset=5, image_size=48)).images.shape == (5, 3, 48, 48)
    assert load("shapes", "test").fingerprint != load("shapes", "train").fingerprint


def test_digits():
    pytest.importorskip("sklearn")
    train, test, _ = load_labelled("digits", Request())
    assert (len(train), len(test)) == (1438, 359)
    assert train.images.max() == 255
    assert set(test.labels) == set(range(10))


def write_cifar(root, name, python):
    """Both official layouts with two records a file -> what they hold."""
    layout = LAYOUTS[name]
    folder = root / (layout.python if python else layout.binary)
    folder.mkdir(parents=True)
    expected = {}
    for part in (*layout.train, *layout.test):
        pixels, fine = RNG.integers(0, 255, (2, 3072), np.uint8), RNG.integers(0, 10, 2)
        expected[part] = pixels, fine
        if python:
            content = {b"data": pixels, layout.label_key: fine.tolist(), b"filenames": [b"a", b"b"]}
            (folder / part).write_bytes(pickle.dumps(content, protocol=2))
        else:
            columns = [fine[:, None] // 2] * (layout.label_bytes - 1) + [fine[:, None], pixels]
            np.concatenate(columns, axis=1).astype(np.uint8).tofile(folder / f"{part}.bin")
    return folder, layout, expected


@pytest.mark.parametrize("python", [False, True], ids=["binary", "python"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_cifar_in_both_layouts(tmp_path, name, python):
    _, layout, expected = write_cifar(tmp_path, name, python)
    for split, parts in (("train", layout.train), ("test", layout.test)):
        images = load(name, split, Request(str(tmp_path)))
        assert np.array_equal(images.images.reshape(-1, 3072), np.concatenate([expected[p][0] for p in parts]))
        assert np.array_equal(images.labels, np.concatenate([expected[p][1] for p in parts]))


class Attack:
    def __reduce__(self):
        return os.system, ("touch attacked",)


def test_cifar_pickles_cannot_run_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder, *_ = write_cifar(tmp_path, "cifar100", python=True)
    (folder / "train").write_bytes(pickle.dumps({b"data": Attack()}))
    with pytest.raises(UserError, match=r"train cannot be read .*system"):
        load("cifar100", "train", Request(str(tmp_path)))
    assert not (tmp_path / "attacked").exists()


def test_cifar_damaged_or_missing(tmp_path, monkeypatch):
    folder, *_ = write_cifar(tmp_path, "cifar10", python=False)
    (folder / "test_batch.bin").write_bytes(b"x" * 100)
    with pytest.raises(UserError, match=r"test_batch\.bin has 100 bytes"):
        load("cifar10", "test", Request(str(tmp_path)))
    monkeypatch.setattr("torchvision.datasets.utils.download_and_extract_archive", lambda *a, **k: 1 / 0)
    with pytest.raises(UserError, match="put the folder cifar-100-binary or cifar-100-python there"):
        load("cifar100", "train", Request(str(tmp_path)))


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("train", {b"data": [[300]]}, "is not a CIFAR batch: it has no fine_labels and data"),
        ("train", {b"fine_labels": 3}, r"data has shape \(2, 3072\) for 1 labels"),
        ("train", {b"data": [], b"fine_labels": []}, r"data has shape \(0,\) for 0 labels"),
        ("train", {b"fine_labels": [-1, 2]}, "holds the label -1, but there are 100 classes"),
        ("meta", {b"fine_label_names": 5}, None),
        ("meta", {b"fine_label_names": [b"\xff"] * 100}, None),
    ],
)
def test_cifar_with_other_things_in_it(tmp_path, file, change, words):
    folder, *_ = write_cifar(tmp_path, "cifar100", python=True)
    content = {b"data": np.zeros((2, 3072), np.uint8), b"fine_labels": [1, 2]} if file == "train" else {}
    (folder / file).write_bytes(pickle.dumps(content | change, protocol=2))
    if words is None:  # names are for people: a set with odd ones can be learned from
        assert len(load("cifar100", "train", Request(str(tmp_path))).classes) == 100
    else:
        with pytest.raises(UserError, match=words):
            load("cifar100", "train", Request(str(tmp_path)))


def test_cifar_names_that_are_no_text(tmp_path):
    folder, *_ = write_cifar(tmp_path, "cifar10", python=False)
    (folder / "batches.meta.txt").write_bytes(b"\xff " * 10)
    assert len(load("cifar10", "test", Request(str(tmp_path))).classes) == 10


def test_tiny_imagenet_layout(tmp_path):
    root = tmp_path / "tiny-imagenet-200"
    (root / "val").mkdir(parents=True)
    (root / "wnids.txt").write_text("n2\nn1\n")
    for wnid in ("n1", "n2"):
        write_images(root / "train" / wnid / "images", 2, (64, 64), ".JPEG")
    write_images(root / "val" / "images", 2, (64, 64), ".JPEG")
    names = sorted(p.name for p in (root / "val" / "images").iterdir())
    (root / "val" / "val_annotations.txt").write_text("".join(f"{n}\tn1\t0\t0\t9\t9\n" for n in names))
    train, test, split = load_labelled("tiny-imagenet", Request(str(tmp_path)))
    assert train.labels.tolist() == [1, 1, 0, 0]  # numbered as in wnids.txt
    assert test.labels.tolist() == [1, 1]
    assert train.images.shape == (4, 3, 64, 64)
    assert split == "official"
    for name, content in (("val/val_annotations.txt", b"no tab"), ("wnids.txt", b"\xff")):
        (root / name).write_bytes(content)
        with pytest.raises(UserError, match=r"its lists in .* cannot be read; fetch it again"):
            load("tiny-imagenet", "test", Request(str(tmp_path)))


def test_imagenet_layout_and_subset(tmp_path):
    with pytest.raises(UserError, match=r"imagenet/train/<wnid>/<image>.JPEG"):
        load("imagenet", "train", Request(str(tmp_path)))
    for wnid in ("n1", "n2", "n3"):
        write_images(tmp_path / "imagenet" / "train" / wnid, 4, (40, 30), ".JPEG")
    request = Request(str(tmp_path), image_size=32, subset=7, seed=3)
    images = load("imagenet", "train", request)
    assert len(images) == 7
    assert images.files == load("imagenet", "train", request).files
    assert images.files != load("imagenet", "train", Request(str(tmp_path), 32, 7, seed=4)).files
    with pytest.raises(UserError, match="--subset 13"):
        load("imagenet", "train", Request(str(tmp_path), subset=13))


def test_any_folder_with_and_without_classes(tmp_path):
    write_images(tmp_path / "flat" / "deep" / "er", 3)
    write_images(tmp_path / "flat", 2)
    flat = load(str(tmp_path / "flat"), request=Request(image_size=16))
    assert (len(flat), flat.labels, flat.images.shape[-1]) == (5, None, 19)
    assert flat.aspect.tolist() == [2.0] * 5
    with pytest.raises(UserError, match="no labels"):
        load_labelled(str(tmp_path / "flat"), Request(image_size=16))
    for name in ("cat", "dog"):
        write_images(tmp_path / "classes" / name, 10)
    train, test, split = load_labelled(str(tmp_path / "classes"), Request(image_size=16))
    assert (len(train), len(test), split) == (16, 4, "20% of each class held out of the labels")
    assert set(train.files).isdisjoint(test.files)
    assert sorted(test.labels.tolist()) == [0, 0, 1, 1]
    (tmp_path / "classes" / "fox").mkdir()
    (tmp_path / "classes" / "fox" / "broken.jpg").write_bytes(b"x")
    with pytest.raises(UserError, match="label fox has no image that can be read, and two are needed"):
        load_labelled(str(tmp_path / "classes"), Request(image_size=16))
    for part in ("train", "val"):
        for name in ("cat", "dog"):
            write_images(tmp_path / "parts" / part / name, 3)
    train, test, split = load_labelled(str(tmp_path / "parts"), Request(image_size=16))
    assert (len(train), len(test), split) == (6, 6, "folders")


def test_a_pack_is_made_once_and_a_changed_folder_noticed(tmp_path, monkeypatch):
    write_images(tmp_path / "photos", 4)
    request = Request(image_size=16)
    first = load(str(tmp_path / "photos"), request=request)
    with monkeypatch.context() as patch:
        patch.setattr("onecrop.data.pack.decode", lambda *a: pytest.fail("decoded twice"))
        assert load(str(tmp_path / "photos"), request=request).fingerprint == first.fingerprint
    write_images(tmp_path / "photos", 5, seed=1)
    assert load(str(tmp_path / "photos"), request=request).fingerprint != first.fingerprint


def test_pixels_survive_packing(tmp_path):
    """A picture stored at its own size comes back as it was."""
    pixels = RNG.integers(0, 255, (64, 64, 3), np.uint8)
    (tmp_path / "one").mkdir()
    Image.fromarray(pixels).save(tmp_path / "one" / "a.png")
    packed = load(str(tmp_path / "one"), request=Request(image_size=56))
    assert np.array_equal(packed.images[0], pixels.transpose(2, 0, 1))


def test_unreadable_images_are_left_out_and_listed(tmp_path, capsys):
    write_images(tmp_path / "photos", 3)
    (tmp_path / "photos" / "broken.jpg").write_bytes(b"not a picture")
    (tmp_path / "photos" / "empty.png").touch()
    for _ in range(2):  # made, then opened
        images = load(str(tmp_path / "photos"), request=Request(image_size=16))
        assert len(images) == 3
        assert all("picture" in f for f in images.files)
        sentence = capsys.readouterr().out
        assert "2 files cannot be read and are left out" in sentence
        with open(sentence.strip().split("listed in ")[1]) as file:
            assert file.read().splitlines() == [
                "broken.jpg\tnot an image, or damaged in its first bytes",
                "empty.png\tthe file is empty",
            ]


def test_folders_that_cannot_work(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no images found below"):
        load(str(tmp_path / "empty"))
    with pytest.raises(UserError, match="did you mean 'cifar10'"):
        load("cifar1")
    with pytest.raises(UserError, match="is not a folder"):
        load(str(tmp_path / "absent"))
    with pytest.raises(UserError, match="an empty name is not a folder"):
        load("")  # as by a variable that a shell does not know


def image_set(count):
    images = np.broadcast_to(np.arange(count, dtype=np.uint8).reshape(-1, 1, 1, 1), (count, 3, 4, 4))
    return ImageSet("numbers", np.ascontiguousarray(images))


def test_loader_visits_every_image_once_an_epoch_in_an_order_of_its_own():
    loader = Loader(image_set(10), 4, torch.device("cpu"), seed=3)
    assert loader.batches_per_epoch == 2  # the incomplete batch is dropped
    epochs = [torch.cat([loader.batch(2 * e + s).index for s in range(2)]) for e in range(3)]
    assert all(len(e.unique()) == 8 for e in epochs)
    assert not torch.equal(epochs[0], epochs[1])
    batch = loader.batch(5)
    assert torch.equal(batch.images[:, 0, 0, 0], batch.index.to(torch.uint8))
    again = Loader(image_set(10), 4, torch.device("cpu"), seed=3).batch(5)  # a function of the step alone
    assert torch.equal(again.index, batch.index)
    assert torch.equal(again.draws.key, batch.draws.key)


def test_every_step_has_random_numbers_of_its_own():
    """Or an image would be cropped alike in every epoch, and no other test would notice."""
    loader = Loader(image_set(10), 4, torch.device("cpu"), seed=3)
    drawn = [loader.batch(step).draws.uniform("crop", 2) for step in (0, 1, 2, 0)]
    drawn += [batch.draws.uniform("crop", 2) for batch, _ in loader.in_order()]
    drawn.append(Loader(image_set(10), 4, torch.device("cpu"), seed=4).batch(0).draws.uniform("crop", 2))
    assert torch.equal(drawn[0], drawn[3])
    del drawn[3]
    assert len(torch.stack(drawn).flatten(1).unique(dim=0)) == len(drawn)


def test_loader_in_order_covers_the_last_incomplete_batch():
    loader = Loader(image_set(10), 4, torch.device("cpu"), seed=0)
    seen = [batch.index[:count] for batch, count in loader.in_order()]
    assert torch.cat(seen).tolist() == list(range(10))
    assert [len(batch.index) for batch, _ in loader.in_order()] == [4, 4, 4]


def memory_map(path, count):
    pixels = np.memmap(path, np.uint8, "w+", shape=(count, 3, 8, 8))
    pixels[:] = RNG.integers(0, 255, pixels.shape, np.uint8)
    return ImageSet("map", pixels, labels=np.arange(count), aspect=np.linspace(1, 2, count, dtype=np.float32), key="k")


def test_a_part_of_a_memory_map_is_not_read_before_it_is_used(tmp_path):
    whole = memory_map(tmp_path / "images.bin", 20)
    chosen = np.array([7, 3, 11, 2, 19, 5, 13])
    some = whole.take(chosen)
    copy = ImageSet("copy", np.array(whole.images)[chosen], aspect=whole.aspect[chosen])
    again = some.take(np.array([4, 1]))
    expected = np.array(whole.images)[[19, 3]]
    assert some.images.shape == copy.images.shape
    assert some.images.nbytes == copy.images.nbytes
    assert np.array_equal(again.images[:], expected)
    assert again.labels.tolist() == [19, 3]
    assert len({whole.fingerprint, some.fingerprint, again.fingerprint}) == 3
    loaders = [Loader(images, 3, torch.device("cpu"), seed=0) for images in (some, copy)]
    for step in range(5):
        mine, other = (loader.batch(step) for loader in loaders)
        assert torch.equal(mine.images, other.images)
        assert torch.equal(mine.aspect, other.aspect)
        assert torch.equal(mine.index, other.index)
    for (mine, count), (other, _) in zip(*(loader.in_order() for loader in loaders), strict=True):
        assert torch.equal(mine.images[:count], other.images[:count])
    whole.images[19] = 0  # nothing was copied: the part shows what the map holds now
    assert not again.images[0].any()


def test_loader_refuses_a_batch_larger_than_the_set():
    with pytest.raises(UserError, match="lower --batch-size"):
        Loader(image_set(3), 4, torch.device("cpu"), seed=0)


def test_two_folders_with_like_files_get_two_packs(tmp_path):
    """Same names, sizes and times, other pixels: uncompressed files from a reproducible archive."""
    for i, name in enumerate(("one", "two")):
        write_images(tmp_path / name, 3, (16, 16), ".bmp", seed=i)
        for file in (tmp_path / name).iterdir():
            os.utime(file, (0, 0))
    one, two = (load(str(tmp_path / name), request=Request(image_size=16)) for name in ("one", "two"))
    assert not np.array_equal(one.images, two.images)
    assert one.fingerprint != two.fingerprint


def test_a_damaged_pack_is_made_again(tmp_path):
    write_images(tmp_path / "photos", 3)
    whole = load(str(tmp_path / "photos"), request=Request(image_size=16))
    before = np.array(whole.images)
    for name, content in (("images.bin", b"x"), ("pack.json", b""), ("pack.json", b"{}")):
        (file,) = (tmp_path / "cache").glob(f"*/{name}")
        file.write_bytes(content)
        assert np.array_equal(load(str(tmp_path / "photos"), request=Request(image_size=16)).images, before)


@pytest.mark.parametrize("names", [("train", "valid"), ("train", "validation", "test")])
def test_folder_splits_by_their_usual_names(tmp_path, names):
    root = tmp_path / "data"
    for part in names[:2]:
        for label in ("cat", "dog"):
            write_images(root / part / label, 2)
    for part in names[2:]:
        write_images(root / part, 2)  # handed out without labels
    (root / "train" / "cat" / ".ipynb_checkpoints").mkdir()
    write_images(root / "train" / ".hidden", 2)
    sets = load_labelled(str(root), Request(image_size=16))
    assert (len(sets.train), len(sets.test), sets.train.classes) == (4, 4, ("cat", "dog"))


def test_pictures_of_every_kind(tmp_path):
    """Deep, grey, palette, transparent and CMYK pictures keep their look in eight bits."""
    ramp = np.linspace(0, 65535, 32 * 32).reshape(32, 32)
    Image.fromarray(ramp.astype(np.uint16)).save(tmp_path / "deep.png")
    Image.fromarray((ramp / 65535).astype(np.float32)).save(tmp_path / "float.tif")
    Image.fromarray((ramp / 257).astype(np.uint8)).save(tmp_path / "grey.png")
    Image.new("RGBA", (32, 32), (255, 0, 0, 0)).save(tmp_path / "transparent.png")
    Image.new("CMYK", (32, 32), (0, 255, 255, 0)).save(tmp_path / "cmyk.jpg")
    Image.fromarray((ramp / 257).astype(np.uint8)).convert("P").save(tmp_path / "palette.gif")
    images = load(str(tmp_path), request=Request(image_size=28))
    pixels = {os.path.basename(f): p for f, p in zip(images.files, images.images.astype(int), strict=True)}
    for name in ("deep.png", "float.tif", "palette.gif"):
        assert abs(pixels[name] - pixels["grey.png"]).max() <= 2, name
    assert pixels["transparent.png"].min() == 255
    assert pixels["cmyk.jpg"][0].min() > 200
    assert pixels["cmyk.jpg"][1:].max() < 60


def test_holdout_parts_the_training_set_and_never_touches_the_test_part():
    whole = load("shapes", "train", Request(image_size=8))
    request = Request(image_size=8, holdout=1000)
    train, aside = load("shapes", "train", request), load("shapes", "test", request)
    assert (len(train), len(aside)) == (3000, 1000)
    both = np.concatenate([train.images, aside.images])
    assert sorted(x.tobytes() for x in both) == sorted(x.tobytes() for x in whole.images)
    again = load("shapes", "train", Request(image_size=8, holdout=1000, seed=5, subset=500))  # whatever the seed
    mine = {x.tobytes() for x in train.images}
    assert len(again) == 500
    assert all(x.tobytes() in mine for x in again.images)
    with pytest.raises(UserError, match="leaves none"):
        load("shapes", "train", Request(image_size=8, holdout=4000))
