// Perplexity of GGUF files on a short text by llama.cpp itself (npm install node-llama-cpp@3.22.1):
// node benchmarks/llama_cpp.mjs theirs.gguf ours.gguf
import {getLlama} from "node-llama-cpp";
const llama = await getLlama({gpu:false, build:"never", usePrebuiltBinaries:true, skipDownload:true});
for (const f of process.argv.slice(2)) {
  const model = await llama.loadModel({modelPath:f});
  const ctx = await model.createContext({contextSize:256});
  const seq = ctx.getSequence();
  const text = "The capital of France is Paris, and the capital of Italy is Rome. Water boils at one hundred degrees, and the sun rises in the east every morning of the year.";
  const toks = model.tokenize(text);
  const input = toks.map((t,i)=> i<toks.length-1 ? [t,{generateNext:{probabilities:true}}] : t);
  const res = await seq.controlledEvaluate(input);
  let nll=0,n=0; for (let i=0;i<toks.length-1;i++){ const p=res[i]?.next?.probabilities?.get(toks[i+1]); if(p){nll-=Math.log(p);n++;} }
  console.log(f, "tokens", toks.length, n, "ppl", Math.exp(nll/n));
}
