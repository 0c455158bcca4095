"""Networks as models of the Hugging Face Hub: `save_pretrained` and `from_pretrained`, without pickle.

A folder holds `model.safetensors`, the file that `YNet.save` writes, and a README; `testtime.load` reads that file too.
"""

# pyright: reportMissingImports=false, reportGeneralTypeIssues=false, reportCallIssue=false
from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import PyTorchModelHubMixin, hf_hub_download
from huggingface_hub.constants import SAFETENSORS_SINGLE_FILE

from testtime.networks.checkpoint import load
from testtime.networks.ynet import YNet


class HubNet(
    YNet,
    PyTorchModelHubMixin,
    library_name="testtime",
    tags=["test-time-training", "image-classification"],
):
    """A `YNet` with the methods of the Hub: `save_pretrained`, `from_pretrained` and `push_to_hub`."""

    @classmethod
    def of(cls, net: YNet) -> HubNet:
        """Return a network as one of the Hub's; both share their weights."""
        made = cls(net.encoder, net.classifier, net.ssl, net.card, channels=net.channels)
        made.statistics, made.cut = net.statistics, net.cut
        return made.train(net.training)

    def _save_pretrained(self, save_directory: Path) -> None:
        self.save(Path(save_directory) / SAFETENSORS_SINGLE_FILE)

    @classmethod
    def _from_pretrained(cls, *, model_id: str, map_location: str = "cpu", **options: Any) -> HubNet:
        """Load from a folder or, if it is none, from the Hub; `net` in the options is the network of a custom model.

        Raises:
            CheckpointError: The file is missing, damaged, or of a custom model and `net` is not given.
        """
        known = ("revision", "cache_dir", "force_download", "token", "local_files_only")
        if Path(model_id).is_dir():
            path = Path(model_id) / SAFETENSORS_SINGLE_FILE
        else:
            given = {name: options[name] for name in known if name in options}
            path = Path(hf_hub_download(model_id, SAFETENSORS_SINGLE_FILE, **given))
        return cls.of(load(path, options.get("net"))).to(map_location)
