// The calculator of memory.md. The formulas are those of kv/pool_size.py, which tests/test_site.py compares.
"use strict";

const MIB = 2 ** 20;

// Layers, KV heads, elements of a head and billions of weights, from each model's own files.
const MODELS = {
  "SmolLM2-135M-Instruct": { layers: 30, kvHeads: 3, headDim: 64, billions: 0.135 },
  "SmolLM2-1.7B-Instruct": { layers: 24, kvHeads: 32, headDim: 64, billions: 1.71 },
  "Llama-3.2-1B-Instruct": { layers: 16, kvHeads: 8, headDim: 64, billions: 1.24 },
  "Llama-3.1-8B-Instruct": { layers: 32, kvHeads: 8, headDim: 128, billions: 8.03 },
  "Mistral-7B-Instruct-v0.3": { layers: 32, kvHeads: 8, headDim: 128, billions: 7.25 },
  "Phi-3-mini-4k-instruct": { layers: 32, kvHeads: 32, headDim: 96, billions: 3.82 },
  "Qwen2.5-Coder-1.5B-Instruct": { layers: 28, kvHeads: 2, headDim: 128, billions: 1.54 },
  "Qwen3-0.6B": { layers: 28, kvHeads: 8, headDim: 128, billions: 0.6 },
  "Qwen3-4B": { layers: 36, kvHeads: 8, headDim: 128, billions: 4.02 },
  "Qwen3-8B": { layers: 36, kvHeads: 8, headDim: 128, billions: 8.19 },
};

// Bits of a weight, with its share of the scales.
const WEIGHT_BITS = {
  float32: 32, bfloat16: 16, Q8_0: 8.5, Q6K: 6.5625, Q5K: 5.5, Q4K: 4.5, Q4_0: 4.5, AFQ4: 4.5, HQQ4: 4.5, Q3K: 3.4375,
  Q2K: 2.625,
};

const CACHE_BYTES = { bfloat16: 2, float32: 4, f8e4m3: 1, q4: 0.5 };

// What a model's KV pool takes. `pool.kind` is "tokens", "mib", "share" or "automatic" (the CPU's default).
function memoryPlan({ layers, kvHeads, headDim, cache, blockSize, pool, totalBytes, weightBytes }) {
  const elements = 2 * layers * kvHeads * headDim;
  const scales = { f8e4m3: 2 * layers * kvHeads * 4, q4: elements / 8 }[cache] || 0;
  const blockBytes = blockSize * (elements * CACHE_BYTES[cache] + scales);
  const free = Math.max(0, totalBytes - weightBytes);
  let numBlocks;
  if (pool.kind === "tokens") {
    numBlocks = Math.ceil(pool.value / blockSize);
  } else if (pool.kind === "mib") {
    numBlocks = Math.floor((pool.value * MIB) / blockBytes);
  } else if (pool.kind === "share") {
    numBlocks = Math.floor(Math.max(0, Math.floor(pool.value * totalBytes) - (totalBytes - free)) / blockBytes);
  } else {
    const wanted = pool.sequences * Math.ceil(Math.min(pool.value, 4096) / blockSize);
    numBlocks = Math.min(wanted, Math.floor(Math.min(Math.floor(totalBytes / 4), free) / blockBytes));
  }
  return {
    bytesPerToken: blockBytes / blockSize,
    numBlocks,
    kvBytes: numBlocks * blockBytes,
    kvTokens: numBlocks * blockSize,
    fits: numBlocks >= 1 && numBlocks * blockBytes <= free,
  };
}

const CALCULATOR = `
  <label>Model <select name="model"></select></label>
  <label>Layers <input name="layers" type="number" min="1" step="1"></label>
  <label>KV heads <input name="kvHeads" type="number" min="1" step="1"></label>
  <label>Elements of a head <input name="headDim" type="number" min="1" step="1"></label>
  <label>Weights, billions <input name="billions" type="number" min="0.001" step="any"></label>
  <label>Weights are <select name="weights"></select></label>
  <label>Keys and values are <select name="cache"></select></label>
  <label>Tokens in a block <input name="blockSize" type="number" min="1" max="1024" step="1" value="32"></label>
  <label>Memory, GiB <input name="total" type="number" min="0.1" step="any" value="16"></label>
  <label>Pool by <select name="kind">
    <option value="tokens">tokens</option><option value="mib">MiB</option>
    <option value="share">share of memory</option><option value="automatic">itself, on the CPU</option>
  </select></label>
  <label><span data-of="value">Tokens</span>
    <input name="value" type="number" min="0.001" step="any" value="32768"></label>
  <label data-of="sequences">Sequences at once <input name="sequences" type="number" min="1" step="1" value="32"></label>
  <output aria-live="polite"></output>`;

const VALUES = {
  tokens: ["Tokens", 32768], mib: ["MiB", 1024], share: ["Share", 0.9], automatic: ["The model's context", 32768],
};

function fill(form) {
  const options = (names) => names.map((name) => `<option>${name}</option>`).join("");
  form.model.innerHTML = options([...Object.keys(MODELS), "another"]);
  form.weights.innerHTML = options(Object.keys(WEIGHT_BITS));
  form.cache.innerHTML = options(Object.keys(CACHE_BYTES));
  form.weights.value = "Q4K";
}

function choose(form) {
  for (const [name, value] of Object.entries(MODELS[form.model.value] ?? {})) form[name].value = value;
}

function show(form) {
  const number = (name) => Number(form[name].value);
  const weightBytes = (number("billions") * 1e9 * WEIGHT_BITS[form.weights.value]) / 8;
  const plan = memoryPlan({
    layers: number("layers"), kvHeads: number("kvHeads"), headDim: number("headDim"), cache: form.cache.value,
    blockSize: number("blockSize"), totalBytes: number("total") * 2 ** 30, weightBytes,
    pool: { kind: form.kind.value, value: number("value"), sequences: number("sequences") },
  });
  const mib = (bytes) => `${Math.round(bytes / MIB).toLocaleString("en")} MiB`;
  const output = form.querySelector("output");
  output.classList.toggle("no-room", !plan.fits);
  output.textContent = !Number.isFinite(plan.kvBytes)
    ? "A number is missing."
    : `${plan.numBlocks.toLocaleString("en")} blocks, ${plan.kvTokens.toLocaleString("en")} tokens: ${mib(plan.kvBytes)}` +
      ` of keys and values, ${(plan.bytesPerToken / 1024).toFixed(1)} KiB a token. Weights: about ${mib(weightBytes)}.` +
      ` Together ${mib(plan.kvBytes + weightBytes)}${plan.fits ? "." : ": that does not fit."}`;
}

function start(place) {
  const form = document.createElement("form");
  form.innerHTML = CALCULATOR;
  form.setAttribute("aria-label", "Memory of a model");
  place.append(form);
  fill(form);
  choose(form);
  form.addEventListener("input", (event) => {
    if (event.target === form.model) choose(form);
    else if (["layers", "kvHeads", "headDim", "billions"].includes(event.target.name)) form.model.value = "another";
    if (event.target === form.kind) form.value.value = VALUES[form.kind.value][1];
    form.querySelector("[data-of=value]").textContent = VALUES[form.kind.value][0];
    form.querySelector("[data-of=sequences]").hidden = form.kind.value !== "automatic";
    show(form);
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  form.querySelector("[data-of=sequences]").hidden = true;
  show(form);
}

if (typeof module !== "undefined") {
  module.exports = { memoryPlan, MODELS, WEIGHT_BITS };
} else {
  const place = document.getElementById("memory-calculator");
  if (place) start(place);
}
