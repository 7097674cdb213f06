// The chat: one or two models side by side, each with a conversation of its own; nothing of it leaves this tab but the requests.

import { useEffect, useRef, useState } from "preact/hooks";
import { ask, getJson, type ModelRow, readEvents } from "./api";
import type { ViewProps } from "./main";
import { duration, forget, Notice, recall, short, useKept, useLive } from "./parts";

interface Turn {
  role: "user" | "assistant";
  content: string;
  reasoning?: string;
  calls?: Call[];
  figures?: Figures;
  problem?: string;
}

interface Call {
  name: string;
  arguments: string; // JSON, or as much of it as has come
}

interface Figures {
  id: string; // of the request
  ttftMs?: number;
  totalMs?: number;
  tokensPerS?: number;
  promptTokens?: number;
  cachedTokens?: number;
  outputTokens?: number;
  worker?: string;
}

interface Parameters {
  system: string;
  temperature: string;
  top_p: string;
  max_tokens: string;
  seed: string;
  stop: string;
  tools: string;
}

const ABORTS = "chat.aborts";
const NO_PARAMETERS: Parameters = { system: "", temperature: "", top_p: "", max_tokens: "512", seed: "", stop: "", tools: "" };
const NUMBERS: { name: keyof Parameters; label: string; step: string }[] = [
  { name: "temperature", label: "Temperature", step: "0.1" },
  { name: "top_p", label: "Top p", step: "0.05" },
  { name: "max_tokens", label: "Most tokens", step: "1" },
  { name: "seed", label: "Seed", step: "1" },
];

function makeBody(model: string, turns: Turn[], parameters: Parameters): Record<string, unknown> {
  const messages: Record<string, unknown>[] = parameters.system ? [{ role: "system", content: parameters.system }] : [];
  turns.forEach((turn, place) => {
    const reply = turn.role === "user" ? turns[place + 1] : turn;
    // a question that was not answered is not asked again with the next one
    if (!reply || (!reply.problem && (reply.content || reply.calls))) messages.push({ role: turn.role, content: turn.content });
  });
  const body: Record<string, unknown> = { model, messages, stream: true, stream_options: { include_usage: true } };
  for (const { name } of NUMBERS) if (parameters[name] !== "") body[name] = Number(parameters[name]);
  if (parameters.stop) body.stop = parameters.stop.split(",");
  if (parameters.tools.trim()) body.tools = JSON.parse(parameters.tools);
  return body;
}

/** The calls with parts that follow: the name of a call comes once, its arguments bit by bit. */
function addCalls(calls: Call[], parts: { index: number; function?: Partial<Call> }[]): Call[] {
  const longer = [...calls];
  for (const { index, function: part } of parts) {
    const call = longer[index] ?? { name: "", arguments: "" };
    longer[index] = { name: call.name + (part?.name ?? ""), arguments: call.arguments + (part?.arguments ?? "") };
  }
  return longer;
}

function newId(): string {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return "console-" + Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Stop the answers, and forget the conversations: the next user of this tab may be another one. */
export function forgetChat() {
  for (const abort of recall<AbortController[]>(ABORTS) ?? []) abort.abort();
  forget();
}

export function Chat(_: ViewProps) {
  const [models, setModels] = useState<ModelRow[] | null>(null);
  const [problem, setProblem] = useState("");
  // an answer goes on while another view is shown
  const [chosen, setChosen] = useKept<string[]>("chat.chosen", []);
  const [turns, setTurns] = useKept<Turn[][]>("chat.turns", [[], []]);
  const [text, setText] = useKept("chat.text", "");
  const [parameters, setParameters] = useKept("chat.parameters", NO_PARAMETERS);
  const [aborts, setAborts] = useKept<AbortController[]>(ABORTS, []);
  const [copied, setCopied] = useState("");
  useLive(["metrics"], {}); // while a console is open, the router explains its decisions
  const input = useRef<HTMLTextAreaElement>(null);
  const isBusy = aborts.length > 0;

  useEffect(() => {
    let isOver = false;
    let hasFailed = false;
    const load = async () => {
      let pauseMs = 2000;
      try {
        const page = await getJson<{ models: ModelRow[] }>("/console/api/models");
        if (isOver) return;
        const names = page.models.filter((model) => model.kind === "text");
        setModels(names);
        if (hasFailed) setProblem("");
        hasFailed = false;
        setChosen((old) => (old.length || !names.length ? old : [names[0]!.name]));
        if (names.length) pauseMs = 5000; // others may come
      } catch (error) {
        hasFailed = true;
        if (!isOver) setProblem((error as Error).message);
      }
      if (!isOver) setTimeout(load, pauseMs);
    };
    void load();
    input.current?.focus();
    return () => {
      isOver = true;
    };
  }, []);

  function stop() {
    for (const abort of aborts) abort.abort();
  }

  function patch(pane: number, change: (turn: Turn) => Turn) {
    setTurns((old) => old.map((list, place) => (place === pane && list.length ? [...list.slice(0, -1), change(list[list.length - 1]!)] : list)));
  }

  async function answer(pane: number, model: string, earlier: Turn[], abort: AbortController) {
    const id = newId();
    const beganAt = performance.now();
    let firstAt = 0;
    let lastAt = 0;
    try {
      const body = makeBody(model, earlier, parameters);
      body.nvext = { extra_fields: ["worker_id"] };
      const response = await ask("/v1/chat/completions", {
        method: "POST",
        headers: { "content-type": "application/json", "x-request-id": id },
        body: JSON.stringify(body),
        signal: abort.signal,
      });
      for await (const { data } of readEvents(response)) {
        if (data === "[DONE]") break;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Error(chunk.error.message);
        const now = performance.now();
        const delta = chunk.choices?.[0]?.delta;
        // the second with --reasoning-field-name
        const thought = delta?.reasoning_content ?? delta?.reasoning;
        if (delta && (delta.content || thought || delta.tool_calls)) {
          firstAt ||= now;
          lastAt = now;
          patch(pane, (turn) => ({
            ...turn,
            content: turn.content + (delta.content ?? ""),
            reasoning: (turn.reasoning ?? "") + (thought ?? ""),
            calls: delta.tool_calls ? addCalls(turn.calls ?? [], delta.tool_calls) : turn.calls,
          }));
        }
        // ids of workers have 64 bits, more than a number of JavaScript: they are read from the text
        const worker = /"decode_worker_id":(\d+)/.exec(data)?.[1];
        const usage = chunk.usage;
        if (usage || worker)
          patch(pane, (turn) => ({
            ...turn,
            figures: {
              ...turn.figures,
              id,
              ...(worker ? { worker: BigInt(worker).toString(16) } : {}),
              ...(usage
                ? {
                    promptTokens: usage.prompt_tokens,
                    cachedTokens: usage.prompt_tokens_details?.cached_tokens ?? 0,
                    outputTokens: usage.completion_tokens,
                    tokensPerS: lastAt > firstAt ? ((usage.completion_tokens - 1) / (lastAt - firstAt)) * 1000 : undefined,
                  }
                : {}),
            },
          }));
      }
    } catch (error) {
      const isStopped = abort.signal.aborted;
      patch(pane, (turn) => ({ ...turn, problem: isStopped ? undefined : (error as Error).message }));
    }
    patch(pane, (turn) => ({
      ...turn,
      figures: { ...turn.figures, id, ttftMs: firstAt ? firstAt - beganAt : undefined, totalMs: performance.now() - beganAt },
    }));
  }

  function areValid(): boolean {
    try {
      makeBody("", [], parameters);
      setProblem("");
      return true;
    } catch {
      setProblem("Tools: expected a JSON list");
      return false;
    }
  }

  async function send() {
    const question = text.trim();
    if (!question || isBusy || !chosen.length || !areValid()) return;
    setText("");
    const controllers = chosen.map(() => new AbortController());
    setAborts(controllers);
    const earlier = chosen.map((_, pane) => [...turns[pane]!, { role: "user", content: question } as Turn]);
    setTurns((old) => old.map((list, pane) => (earlier[pane] ? [...earlier[pane]!, { role: "assistant", content: "" }] : list)));
    await Promise.all(chosen.map((model, pane) => answer(pane, model, earlier[pane]!, controllers[pane]!)));
    setAborts([]);
    input.current?.focus();
  }

  async function copy(kind: "curl" | "Python") {
    if (!areValid()) return;
    const asked: Turn[] = turns[0]!.length ? turns[0]!.slice(0, -1) : [{ role: "user", content: text || "Hello" }]; // without the last answer
    const body = makeBody(chosen[0] ?? "MODEL", asked, parameters);
    const quoted = JSON.stringify(body).replaceAll("'", "'\\''");
    const { stream_options: _options, ...rest } = body;
    const code =
      kind === "curl"
        ? `curl -N ${location.origin}/v1/chat/completions -H 'Content-Type: application/json' -H "Authorization: Bearer $DYN_API_KEY" -d '${quoted}'`
        : [
            "import json, os",
            "from openai import OpenAI",
            "",
            `client = OpenAI(base_url="${location.origin}/v1", api_key=os.environ.get("DYN_API_KEY", "unused"))`,
            `stream = client.chat.completions.create(**json.loads(${JSON.stringify(JSON.stringify(rest))}))`,
            "for chunk in stream:",
            '    print(chunk.choices[0].delta.content or "", end="", flush=True)',
          ].join("\n");
    try {
      await navigator.clipboard.writeText(code);
      setCopied(`${kind} copied`);
    } catch {
      setCopied(code);
    }
  }

  if (models && !models.length && !turns[0]!.length)
    return <Notice>No model is served yet: start a worker, for example <code>make run</code>. This page notices it.</Notice>;
  return (
    <div class={`chat ${chosen.length > 1 ? "two" : ""}`}>
      <div class="panes">
        {chosen.map((model, pane) => (
          <section class="pane" aria-label={`Conversation ${pane + 1}`}>
            <div class="pane-head">
              <label>
                <span class="hidden">Model {pane + 1}</span>
                <select
                  value={model}
                  disabled={isBusy}
                  onChange={(event) => {
                    const name = event.currentTarget.value;
                    setChosen((old) => old.map((one, place) => (place === pane ? name : one)));
                  }}
                >
                  {models?.map((one) => <option value={one.name}>{one.name}</option>)}
                </select>
              </label>
              {pane === 0 && chosen.length === 1 && models && (
                <button type="button" disabled={isBusy} onClick={() => setChosen([model, (models[1] ?? models[0])!.name])}>Compare</button>
              )}
              {pane === 1 && <button type="button" disabled={isBusy} onClick={() => setChosen([chosen[0]!])}>Close</button>}
              {turns[pane]!.length > 0 && (
                <button type="button" disabled={isBusy} onClick={() => setTurns((old) => old.map((list, place) => (place === pane ? [] : list)))}>New</button>
              )}
            </div>
            <Conversation turns={turns[pane]!} isBusy={isBusy} />
          </section>
        ))}
      </div>
      {problem && <Notice kind="bad">{problem}</Notice>}
      <form class="ask" onSubmit={(event) => { event.preventDefault(); void send(); }}>
        <label class="hidden" for="question">Message</label>
        <textarea
          id="question"
          ref={input}
          rows={2}
          placeholder="Ask something …  Enter sends, Shift+Enter breaks the line, Esc stops"
          value={text}
          onInput={(event) => setText(event.currentTarget.value)}
          onKeyDown={(event) => {
            if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
              event.preventDefault();
              void send();
            } else if (event.key === "Escape") stop();
          }}
        />
        {isBusy ? <button type="button" class="primary" onClick={stop}>Stop</button> : <button class="primary" type="submit" disabled={!text.trim() || !chosen.length}>Send</button>}
      </form>
      <div class="below">
        <details>
          <summary>Parameters</summary>
          <div class="fields">
            <label class="wide">System prompt<textarea rows={2} value={parameters.system} onInput={(event) => setParameters({ ...parameters, system: event.currentTarget.value })} /></label>
            {NUMBERS.map(({ name, label, step }) => (
              <label>{label}<input type="number" min="0" step={step} value={parameters[name]} onInput={(event) => setParameters({ ...parameters, [name]: event.currentTarget.value })} /></label>
            ))}
            <label>Stop strings, by commas<input value={parameters.stop} onInput={(event) => setParameters({ ...parameters, stop: event.currentTarget.value })} /></label>
            <label class="wide">Tools (JSON)<textarea rows={2} value={parameters.tools} onInput={(event) => setParameters({ ...parameters, tools: event.currentTarget.value })} /></label>
          </div>
        </details>
        <span class="copies">
          <button type="button" onClick={() => copy("curl")}>Copy as curl</button>
          <button type="button" onClick={() => copy("Python")}>Copy as Python</button>
          <span class="muted" role="status">{copied.length < 40 ? copied : ""}</span>
        </span>
      </div>
      {copied.length >= 40 && <pre tabIndex={0}>{copied}</pre>}
    </div>
  );
}

function Conversation(props: { turns: Turn[]; isBusy: boolean }) {
  const end = useRef<HTMLDivElement>(null);
  useEffect(() => end.current?.scrollIntoView({ block: "nearest" }), [props.turns]);
  if (!props.turns.length)
    return (
      <div class="empty">
        <p>Ask twice about the same thing: the second prompt begins like the first, its worker still has that part in its KV cache, and the figures below the answer show how much was not computed again.</p>
      </div>
    );
  return (
    <div class="turns" role="log" aria-live="off" tabIndex={0} aria-label="Messages">
      {props.turns.map((turn, place) => (
        <article class={`turn ${turn.role}`}>
          {turn.reasoning && (
            <details><summary>Reasoning</summary><p class="text muted">{turn.reasoning}</p></details>
          )}
          <p class="text">{turn.content || (props.isBusy && place === props.turns.length - 1 && !turn.reasoning ? "…" : "")}</p>
          {turn.calls && <pre tabIndex={0}>{turn.calls.map((call) => `${call.name}(${call.arguments})`).join("\n")}</pre>}
          {turn.problem && <p class="notice bad" role="alert">{turn.problem}</p>}
          {turn.figures && <FigureLine figures={turn.figures} />}
        </article>
      ))}
      <div ref={end} />
    </div>
  );
}

function FigureLine({ figures }: { figures: Figures }) {
  const share = figures.promptTokens ? (figures.cachedTokens ?? 0) / figures.promptTokens : 0;
  return (
    <p class="figures">
      {figures.ttftMs !== undefined && <span>first token <b>{duration(figures.ttftMs)}</b></span>}
      {figures.tokensPerS !== undefined && <span><b>{figures.tokensPerS.toFixed(1)}</b> tokens/s</span>}
      {figures.outputTokens !== undefined && <span><b>{figures.outputTokens}</b> tokens</span>}
      {figures.promptTokens !== undefined && (
        <span class={share > 0 ? "good" : ""}>
          <b data-cached>{figures.cachedTokens}</b> of {figures.promptTokens} prompt tokens cached
        </span>
      )}
      {figures.worker && <span>worker {short(figures.worker)}</span>}
      <a href={`#/requests/${figures.id}`}>Where did it go, and why?</a>
    </p>
  );
}
