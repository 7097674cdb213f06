import { useEffect, useState } from "preact/hooks";
import { ask, getJson, type ModelRow } from "./api";
import type { ViewProps } from "./main";
import { count, Notice } from "./parts";

export function Models({ session }: ViewProps) {
  const [models, setModels] = useState<ModelRow[] | null>(null);
  const [problem, setProblem] = useState("");
  useEffect(() => {
    const load = () => getJson<{ models: ModelRow[] }>("/console/api/models").then((page) => { setModels(page.models); setProblem(""); }, (error: Error) => setProblem(error.message));
    void load();
    const timer = setInterval(load, 2000);
    return () => clearInterval(timer);
  }, []);
  if (problem) return <Notice kind="bad">{problem}</Notice>;
  if (!models) return <p class="muted">Loading …</p>;
  if (!models.length) return <Notice>No model is served.</Notice>;
  return <div class="cards">{models.map((model) => <Card model={model} mayChange={session.may_administer && !!model.is_changeable} />)}</div>;
}

function demand(model: ModelRow): string {
  if (model.failure) return `not loaded: ${model.failure}`;
  const phase = model.phase || (model.num_workers ? "loaded" : "unloaded");
  if (phase === "loaded") return model.is_pinned ? "loaded, and stays loaded" : "loaded";
  return `${phase}: a request waits about ${Math.round(model.estimate_s ?? 0)} s`;
}

function Changes({ model }: { model: ModelRow }) {
  const [problem, setProblem] = useState("");
  const [asked, setAsked] = useState("");
  const change = (action: string) => {
    setAsked(action);
    setProblem("");
    const body = JSON.stringify({ model: model.name });
    ask(`/models/${action}`, { method: "POST", body, headers: { "content-type": "application/json" } }).catch((error: Error) => setProblem(error.message)).finally(() => setAsked(""));
  };
  const actions = model.is_pinned
    ? [["unpin", "Unpin"]]
    : [model.phase === "loaded" ? ["unload", "Unload"] : ["load", "Load"], ["pin", "Pin"]];
  return (
    <>
      <p class="changes">{actions.map(([action, name]) => <button type="button" disabled={!!asked} onClick={() => change(action!)}>{name}</button>)}</p>
      {problem && <Notice kind="bad">{problem}</Notice>}
    </>
  );
}

function Card({ model, mayChange }: { model: ModelRow; mayChange: boolean }) {
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
      {model.is_on_demand && <p class="muted small">A request loads it. It is unloaded when it is idle or another model needs its memory, unless it is pinned; <code>dynamo ps</code> shows who waits.</p>}
      {mayChange && <Changes model={model} />}
      <dl>{facts.map(([name, value]) => <div><dt>{name}</dt><dd>{value}</dd></div>)}</dl>
      {model.chat_template && <details><summary>Chat template</summary><pre class="small" tabIndex={0}>{model.chat_template}</pre></details>}
      <details><summary>Files</summary><ul class="small">{Object.entries(model.files ?? {}).map(([name, sum]) => <li>{name} <code class="muted">{sum.slice(0, 23)}…</code></li>)}</ul></details>
    </section>
  );
}
