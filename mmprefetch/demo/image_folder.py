# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""The dataset of the first run: images in one folder for each class."""

from pathlib import Path

from mmengine.dataset import BaseDataset
from mmengine.registry import DATASETS

IMAGE_SUFFIXES = ('.bmp', '.jpeg', '.jpg', '.png')


@DATASETS.register_module()
class ImageFolderDataset(BaseDataset):
    """Images in one folder per class: ``data_root/split/class_name/image``.

    The folders' names in sorted order are the classes, and become ``metainfo['classes']``. Files
    are listed when the dataset is built and read by the pipeline, one at a time. Each item handed
    to the pipeline is ``dict(img_path=str, gt_label=int)``.

    Args:
        data_root (str): Folder that holds the splits.
        split (str): Folder of this split below ``data_root``.
        **kwargs: Further arguments of mmengine's ``BaseDataset``, among them ``pipeline``.

    Raises:
        FileNotFoundError: If the split's folder is missing or holds no class folders or images.
    """

    def __init__(self, data_root: str, split: str = 'train', **kwargs) -> None:
        self.split = split
        self.folder = Path(data_root) / split
        if not self.folder.is_dir():
            raise FileNotFoundError(
                f'dataset.data_root={data_root!r} holds no folder {split!r} (dataset.split); '
                f'write one folder per class below {str(self.folder)!r}, or, for the digits of the '
                f'demo, run `python tools/prepare_demo_data.py`'
            )
        classes = tuple(sorted(path.name for path in self.folder.iterdir() if path.is_dir()))
        metainfo = dict(classes=classes, **kwargs.pop('metainfo', None) or {})
        super().__init__(data_root=data_root, metainfo=metainfo, **kwargs)

    def load_data_list(self) -> list[dict]:
        """List the images of all classes, sorted by class and file name.

        Returns:
            list[dict]: One ``dict(img_path=str, gt_label=int)`` per image.
        """
        data_list = [
            dict(img_path=str(path), gt_label=label)
            for label, name in enumerate(self.metainfo['classes'])
            for path in sorted((self.folder / name).iterdir())
            if path.suffix.lower() in IMAGE_SUFFIXES
        ]
        if not data_list:
            raise FileNotFoundError(
                f'no image ({", ".join(IMAGE_SUFFIXES)}) in the class folders of '
                f'{str(self.folder)!r}, which dataset.data_root and dataset.split name'
            )
        return data_list
