"""What cards say of personal models: what they are, and a few lines of Python that use them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from llm_fed.models.prompt import Prompt
from llm_fed.settings.paths import is_local, public

_LOAD = """import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, {classes}

base, folder = {base!r}, "path/to/this/folder"
prompt = "a prompt"

tokenizer = AutoTokenizer.from_pretrained(base{revision})
model = AutoModelForCausalLM.from_pretrained(base{revision}, dtype={dtype!r}{quantized})
model.generation_config = GenerationConfig(
    do_sample=False, max_new_tokens={most}, eos_token_id={stop}, pad_token_id={pad}
)
model = PeftModel.from_pretrained(model, folder).eval()

{encode}
inputs = torch.tensor([ids], device=model.device)
output = model.generate(input_ids=inputs, attention_mask=torch.ones_like(inputs))[0, len(ids):].tolist()
answer = [token for token in output if token not in {stop}]
print(tokenizer.decode(answer, skip_special_tokens=True).strip())"""
# Of a model with the adapter folded in: all is in one folder, and nothing is PEFT's.
_LOAD_MERGED = (
    _LOAD.replace("from peft import PeftModel\n", "")
    .replace("base, folder = {base!r}, ", "folder = ")
    .replace("from_pretrained(base{revision}", "from_pretrained(folder")
    .replace("{quantized}", "")
    .replace("model = PeftModel.from_pretrained(model, folder).eval()\n", "")
)
_ASK = """# after: llama-server -m model.gguf
import httpx

prompt = "a prompt"
how = {{"temperature": 0, "max_tokens": {most}, "cache_prompt": False}}
{ask}"""
_ASK_TEXT = """asked = {{"prompt": {text!r}.replace("{{prompt}}", prompt), **how}}
answer = httpx.post("http://localhost:8080/v1/completions", json=asked, timeout=600).json()
print(answer["choices"][0]["text"].strip())"""
_ASK_CHAT = """asked = {"messages": [{"role": "user", "content": prompt}], **how}
answer = httpx.post("http://localhost:8080/v1/chat/completions", json=asked, timeout=600).json()
print(answer["choices"][0]["message"]["content"].strip())"""
_ENCODE = """text = {text!r}.replace("{{prompt}}", prompt)
ids = tokenizer(text)["input_ids"]
if ids[-1] == tokenizer.eos_token_id:  # some tokenizers end every text with it
    ids = ids[:-1]"""
_ENCODE_CHAT = """with open(folder + "/prompt.json", encoding="utf-8") as file:
    chat = json.load(file)
ids = tokenizer.apply_chat_template(
    [{"role": "user", "content": prompt}], chat_template=chat["chat_template"], add_generation_prompt=True,
    return_dict=False, date_string=chat["date_string"],
)"""
_QUANTIZED = {  # as `models.loading` does it
    "nf4": "BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4', bnb_4bit_use_double_quant=True, "
    "bnb_4bit_compute_dtype={dtype!r})",
    "int8": "BitsAndBytesConfig(load_in_8bit=True)",
}
_LOAD_IMAGE_ADAPTER = """from peft import PeftModel
from transformers import AutoModelForImageClassification

model = AutoModelForImageClassification.from_pretrained({base!r}, num_labels={labels}, ignore_mismatched_sizes=True)
model = PeftModel.from_pretrained(model, "path/to/this/folder")"""
_LOAD_IMAGE_MODEL = """from transformers import AutoModelForImageClassification

model = AutoModelForImageClassification.from_pretrained("path/to/this/folder")"""
_LOAD_SEQUENCES = """from peft import PeftModel
from transformers import AutoModelForSequenceClassification, AutoTokenizer

base, folder = {base!r}, "path/to/this/folder"  # labels.json there names the {labels} labels in order
tokenizer = AutoTokenizer.from_pretrained(base)
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
model = AutoModelForSequenceClassification.from_pretrained(
    base, num_labels={labels}, pad_token_id=tokenizer.pad_token_id, ignore_mismatched_sizes=True
)
model = PeftModel.from_pretrained(model, folder).eval()
print(model(**tokenizer(["a text"], return_tensors="pt")).logits)"""
_LOAD_SEQUENCE_EXPERTS = """from llm_fed import load_client

client = load_client("path/to/this/folder", {base!r})
print(client.classify(["a text"]))  # the labels' numbers, whose names labels.json has"""
_LOAD_BUILT = """from llm_fed import load_image_model

model = load_image_model("path/to/this/folder")  # logits (N, {labels}) = model(images), (N, 1 or 3, H, W) uint8"""
_LOAD_IMAGE_EXPERTS = """from llm_fed import load_client

client = load_client("path/to/this/folder", {base!r}, labels={labels})
print(client.classify(pixels))  # of images (N, 3, height, width) uint8 the labels' numbers (N,)"""
_LOAD_EXPERTS = """from llm_fed import load_client

client = load_client("path/to/this/folder", {base!r}, dtype={dtype!r})
print(client.generate(["a prompt"])[0])"""


@dataclass(frozen=True)
class Wording:
    """What a personal model is, in a card's words."""

    words: str
    loads: str  # an example in Python
    library: str
    task: str  # the Hub's name of what it does
    on_hub: bool = True  # whether its base can be a Hub model
    says_dtype: bool = False  # whether the card says how the base was loaded


ADAPTER = Wording("A personal LoRA adapter", _LOAD, "peft", "text-generation", says_dtype=True)
EXPERTS = Wording(
    "Personal LoRA experts, a folder each, with their gate,", _LOAD_EXPERTS, "peft", "text-generation", says_dtype=True
)
MERGED = Wording(
    "A personal model, with a LoRA adapter folded into the weights,", _LOAD_MERGED, "transformers", "text-generation",
    says_dtype=True,
)  # fmt: skip
SEQUENCES = Wording("A personal LoRA adapter and head", _LOAD_SEQUENCES, "peft", "text-classification")
SEQUENCE_EXPERTS = Wording(
    "Personal LoRA experts, a folder each, with their gate and head,", _LOAD_SEQUENCE_EXPERTS, "peft",
    "text-classification",
)  # fmt: skip
GGUF = replace(MERGED, loads=_ASK, library="gguf")
IMAGE_ADAPTER = Wording("A personal LoRA adapter", _LOAD_IMAGE_ADAPTER, "peft", "image-classification")
IMAGE_EXPERTS = Wording(
    "Personal LoRA experts, a folder each, with their gate and head,", _LOAD_IMAGE_EXPERTS, "peft",
    "image-classification",
)  # fmt: skip
IMAGE_MODEL = Wording("A personal model", _LOAD_IMAGE_MODEL, "transformers", "image-classification")
BUILT = Wording("A personal model", _LOAD_BUILT, "llm_fed", "image-classification", on_hub=False)
IMAGE_MODELS = Wording(
    "Personal image models, which answer together,", _LOAD_BUILT, "llm_fed", "image-classification", on_hub=False
)


@dataclass(frozen=True)
class Model:
    """What a card says of the model itself."""

    base: str  # the base's name; only one from the Hub is in the front matter
    wording: Wording = ADAPTER
    labels: int = 0  # of a classifier, how many it tells apart
    parts: Sequence[str] = ()  # names of those it consists of, where the base alone does not say it
    prompt: Prompt | None = None  # of a language model, how it is put, and where an answer ends, if that is known
    dtype: str = "float32"  # of the base in the example
    revision: str | None = None  # of the base on the Hub
    quantization: str | None = None  # of the base

    @property
    def base_in_words(self) -> str:
        """The base, or what else the model consists of, and how it was loaded."""
        names = " and ".join(f"`{public(name)}`" for name in self.parts or (self.base,))
        if not self.wording.says_dtype:
            return names
        at = f"revision `{self.revision}`" if self.revision else None
        return f"{names} ({', '.join(filter(None, (at, self.dtype, self.quantization)))})"


def example(model: Model) -> str:
    """A few lines of Python that use the model, with stock transformers and PEFT where these know it."""
    shown, prompt, dtype = model.wording, model.prompt, model.dtype
    base = f"path/to/{public(model.base)}" if is_local(model.base) else model.base
    of_text = shown.loads in (_LOAD, _LOAD_MERGED, _ASK)
    if shown.loads == _LOAD and prompt is None:  # a merge of adapters that do not say how they were trained
        return _LOAD_EXPERTS.format(base=base, dtype=dtype)
    if prompt is None or not of_text:
        return shown.loads.format(base=base, labels=model.labels, dtype=dtype)
    chat = prompt.template.date is not None
    if shown.loads == _ASK:
        ask = _ASK_CHAT if chat else _ASK_TEXT.format(text=prompt.template.text)
        return _ASK.format(most=prompt.max_new_tokens, ask=ask)
    kind, revision = model.quantization, model.revision
    text = shown.loads.format(
        base=base, dtype=dtype, most=prompt.max_new_tokens, stop=list(prompt.stop), pad=prompt.stop[0],
        encode=_ENCODE_CHAT if chat else _ENCODE.format(text=prompt.template.text),
        revision=f", revision={revision!r}" if revision else "",
        quantized=f", quantization_config={_QUANTIZED[kind].format(dtype=dtype)}" if kind else "",
        classes="BitsAndBytesConfig, GenerationConfig" if kind else "GenerationConfig",
    )  # fmt: skip
    return f"import json\n\n{text}" if chat else text
