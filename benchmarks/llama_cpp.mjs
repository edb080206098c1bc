// llama.cpp as a worker of benchmarks/beside.py, by the npm package node-llama-cpp: its prebuilt library picks the
// kernels for the processor. Arguments: the folder in which it was installed, then what beside.py tells every worker.
import { createInterface } from "node:readline";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

const [folder, target, draft, rows, length] = process.argv.slice(2);
const module = pathToFileURL(join(folder, "node_modules/node-llama-cpp/dist/index.js"));
const { DraftSequenceTokenPredictor, getLlama } = await import(module);
const llama = await getLlama({ gpu: false, build: "never", logLevel: "error", maxThreads: 2 });
const open = async (modelPath, sequences, contextSize) => {
  const model = await llama.loadModel({ modelPath, gpuLayers: 0 });
  return model.createContext({ sequences, contextSize, batchSize: 512, threads: 2 });
};

const [contexts, sequences] = [{}, {}]; // made when they are first asked for
const one = async (name, path, options) => {
  contexts[name] ??= await open(path, 1, Number(length));
  return (sequences[name] ??= contexts[name].getSequence(options));
};
const plain = () => one("plain", target);
const paired = async () => {
  if (!sequences.paired) {
    const tokenPredictor = new DraftSequenceTokenPredictor(await one("draft", draft));
    contexts.paired = await contexts.plain.model.createContext({ contextSize: Number(length), batchSize: 512, threads: 2 });
    sequences.paired = contexts.paired.getSequence({ tokenPredictor });
  }
  return sequences.paired;
};
const together = async () => {
  contexts.together ??= await contexts.plain.model.createContext({
    sequences: Number(rows), contextSize: 512, batchSize: 512, threads: 2,
  });
  sequences.together ??= Array.from({ length: Number(rows) }, () => contexts.together.getSequence());
  return sequences.together;
};

async function decode(sequence, prompt, asked) {
  const new_ = [];
  const options = { temperature: asked.temperature, topK: 0, topP: 1, minP: 0, seed: asked.seed, yieldEogToken: true };
  for await (const token of sequence.evaluate(prompt, options)) {
    new_.push(token);
    if (new_.length >= asked.tokens || asked.ends.includes(token)) break;
  }
  return new_;
}

await plain();
console.log(JSON.stringify({ ready: true }));
for await (const line of createInterface({ input: process.stdin })) {
  const asked = JSON.parse(line);
  const many = asked.prompts.length > 1;
  const used = many ? await together() : [await (asked.draft ? paired() : plain())];
  for (const sequence of used) await sequence.clearHistory();
  if (asked.draft) await sequences.draft.clearHistory();
  const start = performance.now();
  const ids = await Promise.all(asked.prompts.map((prompt, i) => decode(used[i], prompt, asked)));
  console.log(JSON.stringify({ ids, seconds: (performance.now() - start) / 1000 }));
}
process.exit(0);
