"""The libraries that ``beside.py`` compares, one class each. Each runs as a process in its own environment:
``python -m benchmarks.workers NAME FOLDER TARGET DRAFT ROWS LENGTH``.

A worker prints a line when it is ready. It then reads requests, one JSON object a line, and answers each with a line:
the new token ids of every prompt, and the seconds that they took. Requests hold ``prompts`` (token ids), ``tokens``
(the most of an answer), ``ends`` (ids that end one), ``temperature``, ``seed``, and ``draft``, whether to speculate. A
worker imports nothing of fly but for fly's own, since most run in an environment without it.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

Asked = dict[str, Any]


class Fly:
    """fly, with its default draft strategy on the draft. ``kernels`` of the name after the colon, as ``fly:w8a8``."""

    def __init__(self, kernels: str, folder: str, target: str, draft: str, rows: int, length: int) -> None:
        fly = self.library = importlib.import_module("fly")
        self.draft, self.fast = draft, None
        self.plain = fly.LLM(target, kernels=kernels or "auto", device="cpu", cache=max(length, rows * 512))

    def decode(self, asked: Asked) -> list[list[int]]:
        if asked["draft"] and self.fast is None:  # it shares the target's weights
            self.fast = self.library.LLM(self.plain, self.draft)
        llm = self.fast if asked["draft"] else self.plain
        llm.scheduler.forget()  # no peer keeps prompts here
        params = self.library.SamplingParams(
            temperature=asked["temperature"], max_tokens=asked["tokens"], seed=asked["seed"],
            ignore_eos=not asked["ends"], stop_token_ids=tuple(asked["ends"]), logprobs=asked.get("logprobs"),
        )  # fmt: skip
        outputs = llm.generate(asked["prompts"], params)
        self.logprobs = outputs[0].logprobs
        return [output.token_ids for output in outputs]


class Transformers:
    """transformers' ``generate``, plain or assisted, with its own settings of assistance (20 tokens at most, while one
    has a probability of 0.4)."""

    def __init__(self, dtype: str, folder: str, target: str, draft: str, rows: int, length: int) -> None:
        self.torch, library = importlib.import_module("torch"), importlib.import_module("transformers")
        library.utils.logging.set_verbosity_error()
        library.utils.logging.disable_progress_bar()
        self.load = lambda path: library.AutoModelForCausalLM.from_pretrained(path, dtype=self.torch.bfloat16).eval()
        self.draft, self.helper, self.model = draft, None, self.load(target)

    def decode(self, asked: Asked) -> list[list[int]]:
        if asked["draft"] and self.helper is None:
            self.helper = self.load(self.draft)
        prompts, ends, torch = asked["prompts"], asked["ends"], self.torch
        longest, pad = max(map(len, prompts)), min(ends, default=0)
        ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        warm = asked["temperature"] > 0
        torch.manual_seed(asked["seed"])
        with torch.inference_mode():
            output = self.model.generate(
                ids, attention_mask=mask, max_new_tokens=asked["tokens"], pad_token_id=pad, eos_token_id=ends or None,
                do_sample=warm, **({"temperature": asked["temperature"], "top_k": 0, "top_p": 1.0} if warm else {}),
                **({"assistant_model": self.helper} if asked["draft"] else {}),
            )  # fmt: skip
        return [cut(row, ends) for row in output[:, longest:].tolist()]


class VLLM:
    """vLLM's CPU build. A process speculates always or never (``vllm:draft``), as the library decides it at start.
    ``vllm:eager`` leaves out ``torch.compile``, which takes minutes at the first start."""

    K = 5

    def __init__(self, kind: str, folder: str, target: str, draft: str, rows: int, length: int) -> None:
        os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_PLUGINS": ""}
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        options: dict[str, Any] = {"enforce_eager": kind == "eager"}
        if kind == "draft":
            os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
            options["speculative_config"] = {"method": "draft_model", "model": draft, "num_speculative_tokens": self.K}
            options["async_scheduling"] = False
        self.library = importlib.import_module("vllm")
        self.model = self.library.LLM(
            target, dtype="bfloat16", max_model_len=length, max_num_seqs=rows, enable_prefix_caching=False,
            disable_log_stats=True, **options,
        )  # fmt: skip

    def decode(self, asked: Asked) -> list[list[int]]:
        params = self.library.SamplingParams(
            temperature=asked["temperature"], max_tokens=asked["tokens"], seed=asked["seed"], detokenize=False,
            ignore_eos=not asked["ends"], stop_token_ids=asked["ends"],
        )  # fmt: skip
        prompts = [{"prompt_token_ids": prompt} for prompt in asked["prompts"]]
        return [list(one.outputs[0].token_ids) for one in self.model.generate(prompts, params, use_tqdm=False)]


class OpenVINO:
    """OpenVINO GenAI's continuous batching, on directories that ``optimum-cli export openvino`` wrote, or
    ``LLMPipeline(GGUF_FILE, "CPU", enable_save_ov_model=True)``. A process speculates always or never
    (``openvino:draft``)."""

    K = 5

    def __init__(self, kind: str, folder: str, target: str, draft: str, rows: int, length: int) -> None:
        self.numpy, self.core = importlib.import_module("numpy"), importlib.import_module("openvino")
        library = self.library = importlib.import_module("openvino_genai")
        scheduler = library.SchedulerConfig()
        scheduler.cache_size, scheduler.max_num_seqs, scheduler.enable_prefix_caching = 1, rows, False
        options = {"draft_model": library.draft_model(draft, "CPU")} if kind == "draft" else {}
        self.speculates = kind == "draft"
        self.model = library.ContinuousBatchingPipeline(target, scheduler, "CPU", {**options})

    def decode(self, asked: Asked) -> list[list[int]]:
        config = self.library.GenerationConfig()
        config.max_new_tokens, config.rng_seed = asked["tokens"], asked["seed"]
        config.stop_token_ids, config.ignore_eos = set(asked["ends"]), not asked["ends"]
        config.eos_token_id = asked["ends"][0] if asked["ends"] else -1
        if asked["temperature"]:
            config.do_sample, config.temperature = True, asked["temperature"]
        if self.speculates:
            config.num_assistant_tokens = self.K
        inputs = [self.core.Tensor(self.numpy.array([prompt], dtype=self.numpy.int64)) for prompt in asked["prompts"]]
        results = self.model.generate(inputs, [config] * len(inputs))
        return [cut(list(result.m_generation_ids[0]), asked["ends"]) for result in results]


class LlamaCpp:
    """llama.cpp's own server, ``FOLDER/llama-server``, on GGUF files. A process speculates always or never:
    ``llama.cpp:7`` drafts up to 7 tokens a round."""

    def __init__(self, k: str, folder: str, target: str, draft: str, rows: int, length: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        words = [f"{folder}/llama-server", "--model", target, "--port", port]
        words += ["--threads", os.environ["OMP_NUM_THREADS"], "--parallel", str(rows)]
        words += ["--kv-unified", "--ctx-size", str(max(length, rows * 512))]
        words += ["--cache-ram", "0", "--ctx-checkpoints", "0"]  # no peer keeps prompts here
        if k:
            words += ["--spec-draft-model", draft, "--spec-type", "draft-simple", "--spec-draft-n-max", k]
        self.url = f"http://127.0.0.1:{port}"
        server = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while not self._ready():
            if server.poll() is not None:
                raise RuntimeError(f"{' '.join(words)} ended with status {server.returncode}")
            time.sleep(0.05)

    def _ready(self) -> bool:
        try:
            return bool(urllib.request.urlopen(f"{self.url}/health").status == 200)
        except OSError:
            return False

    def decode(self, asked: Asked) -> list[list[int]]:
        with ThreadPoolExecutor(len(asked["prompts"])) as pool:
            return list(pool.map(lambda prompt: self._complete(prompt, asked), asked["prompts"]))

    def _complete(self, prompt: list[int], asked: Asked) -> list[int]:
        body = {
            "prompt": prompt, "n_predict": asked["tokens"], "temperature": asked["temperature"], "seed": asked["seed"],
            "samplers": ["temperature"], "cache_prompt": False, "return_tokens": True, "ignore_eos": not asked["ends"],
        }  # fmt: skip
        request = urllib.request.Request(f"{self.url}/completion", json.dumps(body).encode())
        with urllib.request.urlopen(request) as response:
            return cut(json.load(response)["tokens"], asked["ends"])


def cut(ids: list[int], ends: list[int]) -> list[int]:
    """``ids`` up to the first of ``ends``."""
    return ids[: next((at + 1 for at, token in enumerate(ids) if token in ends), len(ids))]


def main(name: str, folder: str, target: str, draft: str, rows: str, length: str) -> None:
    """Serve requests from standard input. What the library prints goes to standard error."""
    answers, sys.stdout = os.fdopen(os.dup(1), "w"), sys.stderr
    os.dup2(2, 1)
    kind, _, precision = name.partition(":")
    kinds = {"fly": Fly, "transformers": Transformers, "vllm": VLLM, "openvino": OpenVINO, "llama.cpp": LlamaCpp}
    worker = kinds[kind](precision, folder, target, draft, int(rows), int(length))
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        start = time.perf_counter()
        answer: dict[str, Any] = {"ids": worker.decode(asked), "seconds": time.perf_counter() - start}
        if asked.get("logprobs"):
            answer["logprobs"] = [sorted(one.values(), reverse=True) for one in worker.logprobs]
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
