// Perplexity of GGUF files by llama.cpp itself (npm install node-llama-cpp@3.22.1), on the first
// 512 tokens of a text, and those tokens, as a line of JSON for each file:
// node benchmarks/llama_cpp.mjs text.txt theirs.gguf ours.gguf
//
// llama.cpp rounds activations to 8 bits in groups of 32, so that a single token's loss moves by
// a tenth of a nat. A short text says little.
import {readFileSync} from "node:fs";
import {getLlama} from "node-llama-cpp";
const COUNT = 512, AT_ONCE = 32;  // each token's probabilities are a map of all words
const llama = await getLlama({gpu: false, build: "never", usePrebuiltBinaries: true, skipDownload: true});
const [path, ...files] = process.argv.slice(2);
const text = readFileSync(path, "utf8");
for (const file of files) {
  const model = await llama.loadModel({modelPath: file});
  const context = await model.createContext({contextSize: COUNT, threads: 1});
  const sequence = context.getSequence();
  const tokens = [...model.tokenize(text)].slice(0, COUNT);
  let nats = 0;
  for (let first = 0; first < tokens.length - 1; first += AT_ONCE) {
    const some = tokens.slice(first, Math.min(first + AT_ONCE, tokens.length - 1));
    const outputs = await sequence.controlledEvaluate(
      some.map((token) => [token, {generateNext: {probabilities: true}}])
    );
    outputs.forEach((output, i) => nats -= Math.log(output.next.probabilities.get(tokens[first + i + 1])));
  }
  console.log(JSON.stringify({file, tokens, perplexity: Math.exp(nats / (tokens.length - 1))}));
  await context.dispose();
}
