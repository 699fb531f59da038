"""diffusers' environment, for tests that need it, and tiny pipelines with random weights.

`./headrace install-diffusers` makes the environment. The pipelines are written by diffusers' own `save_pretrained`.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from deploy.local.engine_environment import STAMP

CHECKOUT = Path(__file__).parents[3]
PYTHON = CHECKOUT / ".headrace" / "diffusers" / "bin" / "python"
INSTALLED = (PYTHON.parents[1] / STAMP).exists()
needs_diffusers = pytest.mark.diffusers
LIMIT_S = 600.0
"""How long tests wait for an engine to start or to answer, on a machine that may be busy with other tests."""

PLACE = """
import torch
place = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
"""
"""Where and in which type engines compute, as arguments of a pipeline's `to`."""
IMAGES = """
import json, sys, torch
from pathlib import Path
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer
torch.manual_seed(0)
target = Path(sys.argv[1])
words = target.with_name("words")
words.mkdir()
kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
letters = [chr(byte if byte in kept else 256 + index) for index, byte in enumerate(range(256))]
tokens = ["<|startoftext|>", "<|pad|>", "<|endoftext|>", *letters, *[letter + "</w>" for letter in letters]]
(words / "vocab.json").write_text(json.dumps({token: index for index, token in enumerate(dict.fromkeys(tokens))}))
(words / "merges.txt").write_text("#version: 0.2\\n")
pipe = StableDiffusionPipeline(
    vae=AutoencoderKL(
        block_out_channels=[32, 64], latent_channels=4, norm_num_groups=8,
        down_block_types=["DownEncoderBlock2D"] * 2, up_block_types=["UpDecoderBlock2D"] * 2,
    ),
    unet=UNet2DConditionModel(
        block_out_channels=(32, 64), layers_per_block=1, sample_size=32, cross_attention_dim=32, norm_num_groups=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    ),
    text_encoder=CLIPTextModel(CLIPTextConfig(
        hidden_size=32, intermediate_size=37, num_attention_heads=4, num_hidden_layers=2, vocab_size=1000,
        bos_token_id=0, eos_token_id=2, pad_token_id=1,
    )),
    tokenizer=CLIPTokenizer(str(words / "vocab.json"), str(words / "merges.txt"), model_max_length=77),
    scheduler=DDIMScheduler(beta_schedule="scaled_linear", clip_sample=False, set_alpha_to_one=False, steps_offset=1),
    safety_checker=None, feature_extractor=None, requires_safety_checker=False,
)
CHANGE
pipe.save_pretrained(target)
"""
EDITS = """
from diffusers import StableDiffusionInstructPix2PixPipeline
wide = UNet2DConditionModel.from_config(pipe.unet.config, in_channels=8)
pipe = StableDiffusionInstructPix2PixPipeline(**{**pipe.components, "unet": wide}, requires_safety_checker=False)
"""
"""A change of the pipeline: it changes images as a text says, and makes none from a text alone."""
FLUX = """
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel
letters = Tokenizer(models.WordLevel({"?": 0} | {chr(code): code for code in range(32, 127)}, unk_token="?"))
letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
network = lambda takes: FluxTransformer2DModel(
    patch_size=1, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
    joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8), guidance_embeds=takes,
)
pipe = FluxPipeline(
    scheduler=FlowMatchEulerDiscreteScheduler(), vae=AutoencoderKL.from_config(pipe.vae.config, shift_factor=0.0),
    text_encoder=pipe.text_encoder, tokenizer=pipe.tokenizer,
    text_encoder_2=T5EncoderModel(T5Config(
        vocab_size=128, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4, feed_forward_proj="gated-gelu",
    )),
    tokenizer_2=PreTrainedTokenizerFast(tokenizer_object=letters, pad_token="?", unk_token="?"),
    transformer=network(True),
)
"""
"""A change of the pipeline: Flux's shape. `network(False)` is one that takes no guidance."""
BROKEN_VAE = "pipe.vae.decoder.conv_out.weight.data.fill_(float('nan'))"
"""A change of the pipeline: its pictures are not finite."""
STRICT_CHECKER = """
from diffusers.pipelines.stable_diffusion import StableDiffusionSafetyChecker
from transformers import CLIPConfig, CLIPImageProcessor
small = dict(hidden_size=32, intermediate_size=37, num_attention_heads=4, num_hidden_layers=2)
checker = StableDiffusionSafetyChecker(CLIPConfig(
    text_config=small, vision_config={**small, "image_size": 32, "patch_size": 8}, projection_dim=32))
checker.concept_embeds_weights.data.fill_(-2.0)
checker.special_care_embeds_weights.data.fill_(-2.0)
pipe = StableDiffusionPipeline(**{**pipe.components, "safety_checker": checker,
    "feature_extractor": CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=32)})
"""
"""A change of the pipeline: all of its pictures are blocked."""

VIDEOS = """
import sys, torch
from diffusers import AutoencoderKLWan, PIPELINE, UniPCMultistepScheduler, WanTransformer3DModel
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel
torch.manual_seed(0)
words = {"<pad>": 0, "</s>": 1, "<unk>": 2} | {chr(code): code for code in range(3, 127)}
letters = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
letters.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
PIPELINE(
    tokenizer=PreTrainedTokenizerFast(tokenizer_object=letters, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"),
    text_encoder=UMT5EncoderModel(UMT5Config(
        vocab_size=128, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4, feed_forward_proj="gated-gelu",
    )),
    vae=AutoencoderKLWan(
        base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1,
        temperal_downsample=[False, True, True],
    ),
    transformer=WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=CHANNELS, out_channels=16,
        text_dim=32, freq_dim=256, ffn_dim=32, num_layers=2, cross_attn_norm=True, rope_max_seq_len=32,
        qk_norm="rms_norm_across_heads",
    ),
    scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
).save_pretrained(sys.argv[1])
"""


def run_there(code: str, *arguments: str) -> str:
    """Run code with diffusers' Python; return what it prints."""
    ran = subprocess.run(
        [str(PYTHON), "-c", code, *arguments], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    return ran.stdout


def write_image_pipeline(target: Path, change: str = "") -> Path:
    """Write a Stable Diffusion shape that makes pictures of 64 by 64. `change` is code that changes `pipe` before."""
    run_there(IMAGES.replace("CHANGE", change), str(target))
    return target


def write_video_pipeline(target: Path, *, from_images: bool = False) -> Path:
    """Write a Wan shape that makes videos from texts, or from images."""
    name, channels = ("WanImageToVideoPipeline", 36) if from_images else ("WanPipeline", 16)
    run_there(VIDEOS.replace("PIPELINE", name).replace("CHANNELS", str(channels)), str(target))
    return target
