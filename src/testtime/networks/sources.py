"""Open a network by text: a checkpoint, a bundled network, or a model of another library or of one's own code.

    digits-resnet8-gn-joint                      a bundled network, or a file written by `YNet.save`
    timm:resnet50,weights=FILE                   a model of timm, with weights from a file
    torchvision:resnet50,weights=FILE            likewise of torchvision
    transformers:FOLDER                          a folder written by `save_pretrained`
    path/module.py:function                      what a function without arguments returns: this runs the file

Further options, separated by commas: `classes=FILE`, class names, one per line; `at=LAYER`, where to split. Weights are
those of the model, or a network file of the model, e.g. from `testtime fit-branch`. Nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import re
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from testtime.networks.checkpoint import load, read_checkpoint
from testtime.networks.state_files import find_outputs, fit_state, is_network_file, read_state
from testtime.networks.wrap import split, wrap
from testtime.networks.ynet import YNet
from testtime.storage import FileError, check_file, error_text, printable

_LIBRARIES = ("timm", "torchvision", "transformers")
_OPTIONS = ("weights", "classes", "at")
_LONGEST_LIST = 1 << 24  # bytes of a file of class names


@dataclass(frozen=True)
class ModelSource:
    """A model of another library or of one's own code.

    Attributes:
        kind: `timm`, `torchvision`, `transformers`, or `file` for a function in a Python file.
        name: Its name there: of the model, the folder, or `FILE.py:FUNCTION`.
        weights: File with its weights, or a network file of the model.
        classes: File with class names, one per line.
        at: The layer to split at; None chooses one.
    """

    kind: str
    name: str
    weights: str | None = None
    classes: str | None = None
    at: str | None = None

    def __str__(self) -> str:
        head = self.name if self.kind == "file" else f"{self.kind}:{self.name}"
        given = {name: getattr(self, name) for name in _OPTIONS}
        return head + "".join(f",{name}={value}" for name, value in given.items() if value is not None)


def parse_source(text: str) -> ModelSource | None:
    """Parse the text of a model; None if it is a checkpoint file or the name of a bundled network.

    Raises:
        ValueError: It is a Python file without a function.
    """
    head, *rest = re.split(rf",({'|'.join(_OPTIONS)})=", text)
    kind, colon, name = head.partition(":")
    if not (colon and name and kind in _LIBRARIES):
        kind, name = "file", head
        if head.endswith((".py", ".py:")):
            raise ValueError(f"{text} names no function: pass FILE.py:FUNCTION.")
        if not re.fullmatch(r".+\.py:[^\W\d]\w*", head, re.DOTALL):
            return None
    return ModelSource(kind, name, **dict(zip(rest[::2], rest[1::2], strict=True)))


def add_options(text: str, weights: str | Path | None = None, classes: str | Path | None = None) -> str:
    """Return the text of a model with the given options.

    Raises:
        ValueError: Options are given for a text that is not a model's.
    """
    given = {name: str(value) for name, value in (("weights", weights), ("classes", classes)) if value is not None}
    source = parse_source(text)
    if source is None and given:
        raise ValueError(
            f"--{next(iter(given))} needs a model, -m {', '.join(f'{name}:…' for name in _LIBRARIES)} or "
            f"FILE.py:FUNCTION, got {text or 'none'}."
        )
    return text if source is None else str(replace(source, **given))


def open_network(text: str, branch: bool = False) -> YNet:
    """Open a network: a checkpoint, a bundled network, or a model.

    Args:
        text: See the module.
        branch: Whether a model gets a self-supervised branch, untrained unless its weights are a network file.

    Raises:
        CheckpointError: A checkpoint is missing or damaged.
        FileError: A file of a model is missing or damaged, or does not fit it.
        ValueError: There is no such model, or it cannot be wrapped.
        ModuleNotFoundError: The library is not installed.
    """
    source = parse_source(text)
    return load(text) if source is None else _open_model(source, branch)


def _open_model(source: ModelSource, branch: bool) -> YNet:
    classes = _read_classes(source.classes) if source.classes is not None else ()
    saved = source.weights is not None and is_network_file(source.weights)
    if saved:
        assert source.weights is not None
        card, tensors = read_checkpoint(Path(source.weights))
        branch = any(name.startswith("ssl.") for name in tensors)
        classes = classes or card.classes
    model, about = _make_model(source, len(classes) or None, None if saved else source.weights)
    if isinstance(model, YNet):
        net = model
    else:
        about |= {"classes": classes} if classes else {}
        net = split(model, source.at, **about) if branch else wrap(model, **about)
    if saved:
        assert source.weights is not None
        load(source.weights, net)
    elif classes:
        net.describe(classes=classes)
    return net.eval()


def _make_model(source: ModelSource, outputs: int | None, weights: str | None) -> tuple[nn.Module, dict[str, Any]]:
    """Return a model with its weights, and arguments of `wrap` that its library knows."""
    make = {"timm": _make_timm, "torchvision": _make_torchvision}.get(source.kind)
    if make is None:
        opened = _open_transformers if source.kind == "transformers" else _open_function
        model, about = opened(source)
        if weights is not None:
            model.load_state_dict(fit_state(weights, model, _read_weights(weights)))
        return model, about
    if source.weights is None:
        raise ValueError(f"{source} has no weights: pass a file with --weights; nothing is downloaded.")
    model, about = make(source.name, outputs)
    if weights is not None:
        state = _read_weights(weights)
        found = find_outputs(model, state) if outputs is None else None
        if found is not None:
            model, about = make(source.name, found)
        model.load_state_dict(fit_state(weights, model, state))
    return model, about


def _read_weights(file: str) -> dict[str, Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about a pickle that is refused anyway
        return read_state(file)


def _make_timm(name: str, outputs: int | None) -> tuple[nn.Module, dict[str, Any]]:
    timm = _import("timm")
    if not timm.is_model(name):
        raise ValueError(f"timm has no model {name!r}; timm.list_models() lists them.")
    more = {} if outputs is None else {"num_classes": outputs}
    return timm.create_model(name, pretrained=False, **more), {}


def _make_torchvision(name: str, outputs: int | None) -> tuple[nn.Module, dict[str, Any]]:
    models = _import("torchvision").models
    if name not in models.list_models(module=models):
        raise ValueError(f"torchvision has no classifier {name!r}; torchvision.models.list_models() lists them.")
    more = {} if outputs is None else {"num_classes": outputs}
    usual = getattr(models.get_model_weights(name), "DEFAULT", None)
    about = {} if usual is None else {"preprocessing": usual.transforms()}
    return models.get_model(name, weights=None, **more), about


def _open_transformers(source: ModelSource) -> tuple[nn.Module, dict[str, Any]]:
    folder = Path(source.name)
    check_file(folder / "config.json")  # so that a name is never looked up elsewhere
    library = _import("transformers")
    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    kind = library.AutoModelForImageClassification
    try:
        if source.weights is None:
            with _without_bars(library.utils.logging):
                model, found = kind.from_pretrained(folder, output_loading_info=True, **local)
            wrong = [*found["missing_keys"], *(str(key) for key in found["mismatched_keys"])]
            if wrong:
                raise ValueError(f"its weights do not fit it: {wrong[0]}")
        else:
            model = kind.from_config(library.AutoConfig.from_pretrained(folder, **local))
        about: dict[str, Any] = {}
        if (folder / "preprocessor_config.json").is_file():
            about["preprocessing"] = library.AutoImageProcessor.from_pretrained(folder, **local)
    except Exception as error:  # a damaged folder raises many kinds
        raise FileError(folder, f"transformers cannot open it ({_first_line(error)})") from None
    labels = model.config.id2label or {}
    names = tuple(str(labels.get(number, "")) for number in range(len(labels)))
    if names and names != tuple(f"LABEL_{number}" for number in range(len(names))):
        about["classes"] = names
    return model.float(), about


@contextlib.contextmanager
def _without_bars(settings: Any) -> Iterator[None]:
    """Turn the progress bars of transformers off, given its module of such settings."""
    was_enabled = settings.is_progress_bar_enabled()
    settings.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            settings.enable_progress_bar()


def _open_function(source: ModelSource) -> tuple[nn.Module, dict[str, Any]]:
    file, _, function = source.name.rpartition(":")
    path = Path(file).expanduser().resolve()
    check_file(path)
    spec = importlib.util.spec_from_file_location(f"testtime_model_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # as an import would: dataclasses, for example, look there
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
        make = getattr(module, function, None)
        if not callable(make):
            raise FileError(path, f"has no function {function!r}")
        model = make()
    except FileError:
        raise
    except (Exception, SystemExit) as error:  # code of the user's
        raise FileError(path, f"{function}() failed ({type(error).__name__}: {_first_line(error)})") from error
    finally:
        sys.path.remove(str(path.parent))
    if not isinstance(model, nn.Module):
        raise FileError(path, f"{function}() must return a model, it returned {type(model).__name__}")
    return model, {}


def _first_line(error: BaseException) -> str:
    return next(iter(error_text(error).splitlines()), type(error).__name__)


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(f"{name}:… needs {missing.name}: pip install {name}", name=missing.name) from None


def _read_classes(file: str) -> tuple[str, ...]:
    check_file(file)
    if Path(file).stat().st_size > _LONGEST_LIST:
        raise FileError(file, "too large for a list of class names")
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(file, f"not a text file ({error_text(error)})") from None
    names = tuple(printable(line) for line in lines if line.strip())
    if not names:
        raise FileError(file, "has no class names")
    return names
