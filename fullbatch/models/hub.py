"""An exported folder, pushed to the Hugging Face Hub."""

from __future__ import annotations

import json
from pathlib import Path

from fullbatch.config.extras import require_extra
from fullbatch.models.saved import OPEN_CLIP_CONFIG
from fullbatch.models.weights import first_line


def check_repository(repository: str) -> None:
    """Before any work; whether the user may write there, the hub knows."""
    require_extra("huggingface_hub", "text", "--push")
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise ValueError(f"--push {repository!r} is no name of a repository ({first_line(error)}).") from None
    if repository.count("/") != 1:
        raise ValueError(f"--push {repository!r} must name the owner too, as OWNER/NAME.")


def push_folder(folder: Path, repository: str) -> str:
    """The whole folder to the repository, which is made if need be, and then is private; its address."""
    from huggingface_hub import HfApi

    api = HfApi()
    _name_tokenizer(folder, repository)
    try:
        address = api.create_repo(repository, private=True, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message="fullbatch export")
    except Exception as error:  # of the network, the login or the hub
        raise ValueError(
            f"{folder} is written, but could not be pushed to {repository!r} ({first_line(error)}); log in with "
            f"`hf auth login`, then push it with `hf upload {repository} {folder}`."
        ) from None
    return str(address)


def _name_tokenizer(folder: Path, repository: str) -> None:
    """From the hub open_clip takes the tokenizer of that name; its files are in this folder."""
    file = folder / OPEN_CLIP_CONFIG
    if not file.is_file() or not (folder / "tokenizer.json").is_file():
        return
    config = json.loads(file.read_text(encoding="utf-8"))
    if config["model_cfg"]["text_cfg"].get("hf_tokenizer_name"):
        config["model_cfg"]["text_cfg"]["hf_tokenizer_name"] = repository
        file.write_text(json.dumps(config, indent=4) + "\n", encoding="utf-8")
