import { useEffect, useState } from "preact/hooks";
import { getJson, type ModelRow } from "./api";
import type { ViewProps } from "./main";
import { count, Notice } from "./parts";

export function Models(_: ViewProps) {
  const [models, setModels] = useState<ModelRow[] | null>(null);
  const [problem, setProblem] = useState("");
  useEffect(() => {
    const load = () => getJson<{ models: ModelRow[] }>("/console/api/models").then((page) => { setModels(page.models); setProblem(""); }, (error: Error) => setProblem(error.message));
    void load();
    const timer = setInterval(load, 5000);
    return () => clearInterval(timer);
  }, []);
  if (problem) return <Notice kind="bad">{problem}</Notice>;
  if (!models) return <p class="muted">Loading …</p>;
  if (!models.length) return <Notice>No model is served.</Notice>;
  return <div class="cards">{models.map((model) => <Card model={model} />)}</div>;
}

function demand(model: ModelRow): string {
  if (model.num_workers) return "loaded now";
  if (model.failure) return `not loaded: ${model.failure}`;
  return `not loaded: a request waits about ${Math.round(model.estimate_s ?? 0)} s`;
}

function Card({ model }: { model: ModelRow }) {
  const facts: [string, string][] = [
    ...(model.is_on_demand ? [["On demand", demand(model)] as [string, string]] : []),
    ["Workers", `${model.num_workers}${model.num_prefill_workers ? `, and ${model.num_prefill_workers} for prefill` : ""}`],
    ["Context in force", `${count(model.context_length)} tokens`],
    ["KV cache of a worker", model.total_kv_blocks ? `${count(model.total_kv_blocks)} blocks of ${model.kv_cache_block_size} tokens` : "–"],
    ["Sequences at once", model.max_num_seqs ? String(model.max_num_seqs) : "–"],
    ["Tool calls", model.tool_call_parser || "not parsed"],
    ["Reasoning", model.reasoning_parser || "not parsed"],
    ["Structured output", model.supports_guided ? "yes" : "no"],
    ["Log probabilities", model.supports_logprobs ? "yes" : "no"],
    ["Also called", model.aliases?.join(", ") || "–"],
    ["LoRA adapters", model.loras?.join(", ") || "–"],
  ];
  return (
    <section class="card" aria-label={model.name} data-model={model.name}>
      <h2>{model.name} <small>{model.base ? `adapter of ${model.base}` : model.kind}</small></h2>
      {model.is_on_demand && <p class="muted small">A request loads it. It is unloaded when it is idle or another model needs its memory, unless <code>dynamo serve … --pin NAME</code> keeps it; <code>dynamo ps</code> shows who waits.</p>}
      <dl>{facts.map(([name, value]) => <div><dt>{name}</dt><dd>{value}</dd></div>)}</dl>
      {model.chat_template && <details><summary>Chat template</summary><pre class="small" tabIndex={0}>{model.chat_template}</pre></details>}
      <details><summary>Files</summary><ul class="small">{Object.entries(model.files ?? {}).map(([name, sum]) => <li>{name} <code class="muted">{sum.slice(0, 23)}…</code></li>)}</ul></details>
    </section>
  );
}
