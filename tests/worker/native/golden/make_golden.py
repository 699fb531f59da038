"""Computes with transformers the answers that the tests compare with. It is not part of CI: torch is large.

    python -m venv /tmp/oracle && /tmp/oracle/bin/pip install torch==2.13.0 transformers jinja2
    PYTHONPATH=. /tmp/oracle/bin/python tests/worker/native/golden/make_golden.py [SMOLLM2_DIRECTORY]

SMOLLM2_DIRECTORY is the directory that `services.worker.native.prepare` makes from the default model's GGUF file. The
program writes logits.npz (of random models), llava.npz (of those that take images) and, with the directory,
smollm2.json (greedy answers of the real model) to its own directory.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tests.tiny_model import write_tiny_model
from tests.worker.native.golden.cases import (
    ANSWER_TOKENS,
    CASES,
    CHAT,
    CHECKED_POSITIONS,
    GOLDEN,
    LLAVAS,
    QUESTIONS,
    image_pixels,
    image_prompt,
    prompt_tokens,
)

torch: Any = importlib.import_module("torch")
transformers: Any = importlib.import_module("transformers")

NEW_TOKENS = 64
CHECKED_LOGITS = 512


def main(smollm2: Path | None) -> None:
    with tempfile.TemporaryDirectory() as scratch, torch.no_grad():
        logits = {
            name: random_model(write_tiny_model(Path(scratch) / str(number), **arguments))
            for number, (name, arguments) in enumerate(CASES.items())
        }
        np.savez_compressed(GOLDEN / "logits.npz", allow_pickle=False, **logits)
        seen = [seeing_model(write_tiny_model(Path(scratch) / name, **CASES[name])) for name in LLAVAS]
        images = {f"{name}: {part}": array for name, parts in zip(LLAVAS, seen, strict=True) for part, array in parts}
        np.savez_compressed(GOLDEN / "llava.npz", allow_pickle=False, **images)
        if smollm2 is not None:
            answers = json.dumps(real_model(smollm2), ensure_ascii=False, indent=1)
            (GOLDEN / "smollm2.json").write_text(answers + "\n", encoding="utf-8")
    print(f"torch {torch.__version__}, transformers {transformers.__version__}: {len(logits)} models")


def load(directory: Path) -> Any:
    # eager: the other implementations of attention have no bound by tanh
    sees = "Llava" in (directory / "config.json").read_text()
    kind = transformers.LlavaForConditionalGeneration if sees else transformers.AutoModelForCausalLM
    model, loading = kind.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    unseen: tuple[str, ...] = ("vision_tower", "multi_modal_projector")
    if sees:  # what comes after the features that count
        unseen = ("post_layernorm", "vision_tower.head.", "vision_tower.encoder.layers.2.")
    missing = [name for name in loading.pop("missing_keys") if not any(part in name for part in unseen)]
    assert not missing
    assert not any(loading.values()), loading
    model.eval()
    return model


def random_model(directory: Path) -> Any:
    return load(directory)(torch.tensor([prompt_tokens()])).logits[0, list(CHECKED_POSITIONS)].numpy()


def seeing_model(directory: Path) -> list[tuple[str, Any]]:
    """Compute the embeddings of two images, and the greedy answers to a prompt and to a chat with both."""
    model, settings = load(directory), json.loads((directory / "config.json").read_text())
    side = settings["vision_config"]["image_size"]
    processor = transformers.AutoImageProcessor.from_pretrained(directory)
    pixels = processor([image_pixels(side, number) for number in range(2)], return_tensors="pt")["pixel_values"]
    embeddings = torch.stack(list(model.get_image_features(pixel_values=pixels).pooler_output))
    tokens = embeddings.shape[1]
    shown = "".join(part if isinstance(part, str) else "<image>" * tokens for part in CHAT)
    chat = f"<|im_start|>user\n{shown}<|im_end|>\n<|im_start|>assistant\n"
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    greedy = {"do_sample": False, "max_new_tokens": ANSWER_TOKENS, "min_new_tokens": ANSWER_TOKENS}

    def answer(ids: list[int]) -> Any:
        prompt = torch.tensor([ids])
        mask = torch.ones_like(prompt)
        output = model.generate(prompt, pixel_values=pixels, attention_mask=mask, eos_token_id=None, **greedy)
        return output[0, prompt.shape[1] :].numpy()

    asked = tokenizer(chat, add_special_tokens=False).input_ids
    return [("embeddings", embeddings.numpy()), ("output", answer(image_prompt(tokens))), ("chat", answer(asked))]


def real_model(directory: Path) -> list[dict[str, Any]]:
    """Compute greedy answers, the first logits of each, and the log-probabilities of its prompt's tokens."""
    model, tokenizer = load(directory), transformers.AutoTokenizer.from_pretrained(directory)
    answers = []
    for question in QUESTIONS:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        )
        prompt = tokenizer(text, add_special_tokens=False).input_ids
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones((1, len(prompt)), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            eos_token_id=None,
        )[0, len(prompt) :]
        logits = model(torch.tensor([prompt])).logits[0]
        of_all = torch.log_softmax(logits[:-1], dim=-1)
        answers.append(
            {
                "text": text,
                "prompt": prompt,
                "output": output.tolist(),
                "answer": tokenizer.decode(output, skip_special_tokens=False),
                "first_logits": [round(x, 5) for x in logits[-1, :CHECKED_LOGITS].tolist()],
                "prompt_logprobs": [round(of_all[index, token].item(), 6) for index, token in enumerate(prompt[1:])],
            }
        )
    return answers


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
