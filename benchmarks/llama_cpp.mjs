// Perplexity of GGUF files on a short text by llama.cpp itself (npm install node-llama-cpp@3.22.1),
// and the tokens it made of the text, as a line of JSON for each file:
// node benchmarks/llama_cpp.mjs theirs.gguf ours.gguf
import {getLlama} from "node-llama-cpp";
const llama = await getLlama({gpu: false, build: "never", usePrebuiltBinaries: true, skipDownload: true});
const text = "The capital of France is Paris, and the capital of Italy is Rome. Water boils at one hundred degrees, and the sun rises in the east every morning of the year.";
for (const file of process.argv.slice(2)) {
  const model = await llama.loadModel({modelPath: file});
  const context = await model.createContext({contextSize: 256});
  const tokens = model.tokenize(text);
  const input = tokens.map((t, i) => i < tokens.length - 1 ? [t, {generateNext: {probabilities: true}}] : t);
  const found = await context.getSequence().controlledEvaluate(input);
  let nats = 0;
  for (let i = 0; i < tokens.length - 1; i++) nats -= Math.log(found[i].next.probabilities.get(tokens[i + 1]));
  console.log(JSON.stringify({file, tokens: [...tokens], perplexity: Math.exp(nats / (tokens.length - 1))}));
}
