"""Writes CIFAR-10-LT as folders of photos at three sites, a set that `benchmarks/first_table` can be repeated with.

    python benchmarks/make_photos.py photos --data-root DATA

A folder for each site with a folder for each class: 815 images with 32 x 32 pixels, from 330 airplanes to 3 trucks.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from PIL import Image

from redgrape.data import longtail, partition, sources

SITES = ("north", "south", "west")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("photos", type=Path, help="the folder to write")
    parser.add_argument("--data-root", type=Path, help="folder with the data files (or $REDGRAPE_DATA)")
    options = parser.parse_args()
    source = sources.load("cifar10", sources.data_root(options.data_root))
    labels = np.asarray(source.train.y)
    counts = longtail.exponential(np.bincount(labels).tolist(), ir=100.0, head_cap=330)
    rows = longtail.choose(labels, counts, seed=0)
    names = source.class_names
    owners = partition.partition(labels[rows], "class_dirichlet", len(SITES), alpha=1.0, seed=0)
    for site, owned in zip(SITES, owners, strict=True):
        for row in rows[owned]:
            folder = options.photos / site / names[int(labels[row])]
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.moveaxis(np.asarray(source.train.x[row]), 0, 2)).save(folder / f"{row}.png")
    print(f"{len(rows)} images in {options.photos}")


if __name__ == "__main__":
    main()
