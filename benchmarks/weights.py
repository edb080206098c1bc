"""Checkpoints of the same weights in a precision that another library reads.

``python -m benchmarks.weights gguf FILE.gguf BF16 OUT.gguf`` writes a GGUF file whose matrices have that type (BF16,
Q8_0, ...); the tokenizer and all other fields are the source's.
``python -m benchmarks.weights w8a8 DIRECTORY OUT`` writes a directory of 8-bit weights, a scale for each output, for
vLLM (compressed-tensors, whose activations are rounded to 8 bits for each token)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import gguf
import torch
import typer
from safetensors.torch import load_file, save_file


def write_gguf(source: str, kind: str, path: str) -> None:
    """Write ``source`` to ``path`` with matrices of type ``kind``, rounded from the source's values."""
    reader, wanted = gguf.GGUFReader(source), gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    own = {"GGUF.version", "GGUF.tensor_count", "GGUF.kv_count", "general.architecture", "general.file_type"}
    for name, field in reader.fields.items():
        if name not in own:
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind}"])
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        if len(tensor.shape) == 1:
            writer.add_tensor(tensor.name, values)
        else:
            writer.add_tensor(tensor.name, gguf.quantize(values, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_w8a8(source: str, path: str) -> None:
    """Write the directory ``source`` to ``path``, its layers' matrices in 8 bits; the head keeps its dtype."""
    folder, out = Path(source), Path(path)
    out.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            if name.endswith("_proj.weight"):
                scale = tensor.float().abs().amax(1, keepdim=True) / 127
                tensors[name] = (tensor.float() / scale).round().to(torch.int8)
                tensors[f"{name}_scale"] = scale.to(tensor.dtype)
            else:
                tensors[name] = tensor
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    for file in folder.glob("*.json"):
        if "index" not in file.name:
            shutil.copy(file, out)
    config = json.loads((out / "config.json").read_text())
    whole = {"num_bits": 8, "type": "int", "symmetric": True}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**whole, "strategy": "channel", "dynamic": False},
                "input_activations": {**whole, "strategy": "token", "dynamic": True},
            }
        },
    }
    (out / "config.json").write_text(json.dumps(config, indent=2))


app = typer.Typer(add_completion=False)
app.command("gguf")(write_gguf)
app.command("w8a8")(write_w8a8)

if __name__ == "__main__":
    app()
