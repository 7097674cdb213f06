import { useEffect, useState } from "preact/hooks";
import { type Decision, getJson, type RequestPage, type RequestRow } from "./api";
import type { ViewProps } from "./main";
import { clock, count, duration, Notice, Offline, percent, short, Tile, useLive } from "./parts";

const STAGES: { field: "prepare_ms" | "route_ms" | "prefill_ms" | "decode_ms"; name: string; text: string }[] = [
  { field: "prepare_ms", name: "prepare", text: "admitted, rendered and tokenized" },
  { field: "route_ms", name: "route", text: "a worker was chosen and has it" },
  { field: "prefill_ms", name: "prefill", text: "until the first token: waiting there, and computing the prompt" },
  { field: "decode_ms", name: "decode", text: "from the first token to the last" },
];
const PART_CLASSES = ["part-0", "part-1", "part-2", "part-3", "part-4"];

export function Requests({ rest }: ViewProps) {
  return rest ? <Detail id={decoded(rest)} /> : <List />;
}

/** A part of an address as it was before its encoding; as it stands if it was typed by hand and has none. */
function decoded(text: string): string {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

function List() {
  const [offset, setOffset] = useState(0);
  const [older, setOlder] = useState<RequestPage | null>(null);
  const [state, setState] = useState("");
  const [problem, setProblem] = useState("");
  const live = useLive<{ requests?: RequestPage }>(["requests"], {});
  const isLive = offset === 0 && state === "";
  useEffect(() => {
    setProblem("");
    if (isLive) return setOlder(null);
    let isOver = false;
    const load = () =>
      getJson<RequestPage>(`/console/api/requests?offset=${offset}&limit=50&state=${state}`).then(
        (page) => {
          if (isOver) return;
          setOlder(page);
          setProblem("");
        },
        (error: Error) => isOver || setProblem(error.message),
      );
    void load();
    const timer = offset === 0 ? setInterval(load, 2000) : 0; // what a reader has paged to stays as it is
    return () => {
      isOver = true;
      clearInterval(timer);
    };
  }, [offset, state]);
  const page = isLive ? live.value.requests : older;
  const first = live.value.requests;
  return (
    <>
      <Offline live={live} />
      <div class="tiles">
        <Tile name="In flight" value={count(first?.num_open)} />
        <Tile name="Kept" value={count(first?.total)} note="in flight, and the last 1,000 that ended" />
      </div>
      <div class="tools">
        <label>Show{" "}
          <select value={state} onChange={(event) => { setState(event.currentTarget.value); setOffset(0); }}>
            <option value="">all, live</option>
            <option value="open">in flight</option>
            <option value="done">done</option>
            <option value="failed">failed</option>
          </select>
        </label>
        <Legend />
      </div>
      {problem && <Notice kind="bad">{problem}</Notice>}
      {page && !page.rows.length && (state ? <Notice>No such request.</Notice> : <Notice>No request yet. Ask something in <a href="#/chat">Chat</a>.</Notice>)}
      {page && page.rows.length > 0 && (
        <div class="scroll" tabIndex={0} role="region" aria-label="Requests">
          <table class="stacked">
            <thead>
              <tr><th>Time</th><th>Request</th><th>State</th><th>Stages</th><th class="num">First token</th><th class="num">Total</th><th class="num">Prompt</th><th class="num">Cached</th><th class="num">Output</th><th>Worker</th></tr>
            </thead>
            <tbody>{page.rows.map((row) => <Row row={row} />)}</tbody>
          </table>
        </div>
      )}
      {page && page.total > 50 && (
        <div class="tools">
          <button type="button" disabled={offset === 0} onClick={() => setOffset(Math.max(0, offset - 50))}>Newer</button>
          <span class="muted">{offset + 1} to {offset + page.rows.length} of {page.total}</span>
          <button type="button" disabled={offset + 50 >= page.total} onClick={() => setOffset(offset + 50)}>Older</button>
        </div>
      )}
    </>
  );
}

function Row({ row }: { row: RequestRow }) {
  return (
    <tr data-request={row.id} data-state={row.state}>
      <td data-name="Time" class="small">{clock(row.arrived_at)}</td>
      <td data-name="Request"><a href={`#/requests/${encodeURIComponent(row.id)}`} title={row.id}>{row.model}</a> <span class="muted small">{row.endpoint}{row.key ? `, ${row.key}` : ""}</span></td>
      <td data-name="State"><span class={`state ${row.state}`}>{row.error || row.state}</span></td>
      <td data-name="Stages"><StageBar row={row} /></td>
      <td data-name="First token" class="num">{duration(row.ttft_ms)}</td>
      <td data-name="Total" class="num">{duration(row.total_ms)}</td>
      <td data-name="Prompt" class="num">{count(row.prompt_tokens ?? 0)}</td>
      <td data-name="Cached" class="num">{row.prompt_tokens ? percent((row.cached_tokens ?? 0) / row.prompt_tokens) : "–"}</td>
      <td data-name="Output" class="num">{count(row.output_tokens ?? 0)}</td>
      <td data-name="Worker"><code title={row.worker}>{row.prefill_worker ? `${short(row.prefill_worker)} → ` : ""}{short(row.worker)}</code>{row.num_migrations ? <span class="muted small"> moved {row.num_migrations}×</span> : null}</td>
    </tr>
  );
}

function Legend() {
  return <span class="legend muted small">{STAGES.map((stage) => <span title={stage.text}><i class={`swatch ${stage.name}`} />{stage.name}</span>)}</span>;
}

function StageBar({ row }: { row: RequestRow }) {
  const total = STAGES.reduce((sum, stage) => sum + (row[stage.field] ?? 0), 0) || 1;
  const label = STAGES.filter((stage) => row[stage.field] !== undefined).map((stage) => `${stage.name} ${duration(row[stage.field])}`).join(", ");
  return (
    <span class="stages" role="img" aria-label={label || "no stage yet"} title={label}>
      {STAGES.map((stage) => <span class={stage.name} style={{ width: `${((row[stage.field] ?? 0) / total) * 100}%` }} />)}
    </span>
  );
}

function Detail({ id }: { id: string }) {
  const [row, setRow] = useState<RequestRow | null>(null);
  const [problem, setProblem] = useState("");
  useEffect(() => {
    let isOver = false;
    const load = async () => {
      try {
        const found = await getJson<RequestRow>(`/console/api/requests/${encodeURIComponent(id)}`);
        if (isOver) return;
        setRow(found);
        setProblem("");
        if (found.state !== "done" && found.state !== "failed") setTimeout(load, 1000);
      } catch (error) {
        if (!isOver) setProblem((error as Error).message);
      }
    };
    void load();
    return () => {
      isOver = true;
    };
  }, [id]);
  if (problem) return <><p><a href="#/requests">All requests</a></p><Notice kind="bad">{problem}</Notice></>;
  if (!row) return <p class="muted">Loading …</p>;
  return (
    <>
      <p><a href="#/requests">All requests</a> <span class="muted">/ {row.id}</span></p>
      <div class="tiles">
        <Tile name="State" value={row.error || row.state} note={`${row.endpoint}, ${row.request_type}`} />
        <Tile name="First token" value={duration(row.ttft_ms)} note={`in all ${duration(row.total_ms)}`} />
        <Tile name="Prompt tokens" value={count(row.prompt_tokens ?? 0)} note={`${row.cached_tokens ?? 0} were cached${tiers(row)}`} />
        <Tile name="Output tokens" value={count(row.output_tokens ?? 0)} note={row.num_migrations ? `moved ${row.num_migrations} times` : ""} />
        <Tile name="Worker" value={short(row.worker)} note={row.prefill_worker ? `prompt computed by ${short(row.prefill_worker)}` : row.worker} />
      </div>
      <h2>Where did the time go?</h2>
      <StageBar row={row} />
      <table class="narrow">
        <tbody>
          {STAGES.map((stage) => (
            <tr data-stage={stage.name}><th><i class={`swatch ${stage.name}`} />{stage.name}</th><td class="num">{duration(row[stage.field])}</td><td class="muted">{stage.text}</td></tr>
          ))}
        </tbody>
      </table>
      <h2>Why this worker?</h2>
      {!row.decisions?.length && <Notice>The decision was not explained: explanations are made while a console shows live views, twenty a second at most, and for requests with the header <code>x-dynamo-explain</code>.</Notice>}
      {row.decisions?.map((decision) =>
        decision.kind ? <Verdict decision={decision} /> : <Why decision={decision} chosen={[row.worker, row.prefill_worker]} />,
      )}
    </>
  );
}

function tiers(row: RequestRow): string {
  return Object.entries(row.tier_tokens ?? {}).map(([tier, number]) => `, ${number} on ${tier}`).join("");
}

const QUESTIONS = { model: "Model", prefill: "Prompt computed", migration: "After the loss of its worker" };
const OUTCOMES: Record<string, string> = {
  local: "by the worker that answers",
  remote: "by a prefill worker",
  migrate: "another worker goes on",
  not_allowed: "the answer ends, because migration is off",
  exhausted: "the answer ends, because it has migrated too often",
  too_long: "the answer ends, because it is too long to migrate",
};

function Verdict({ decision }: { decision: Decision }) {
  const question = QUESTIONS[decision.kind!];
  const outcome = decision.kind === "model" ? decision.outcome : OUTCOMES[decision.outcome ?? ""];
  return (
    <section class="why" aria-label={question} data-kind={decision.kind}>
      <p>{question}: <b>{outcome}</b>. Policy <b>{decision.policy}</b>: {decision.reason}.</p>
    </section>
  );
}

function Why({ decision, chosen }: { decision: Decision; chosen: (string | undefined)[] }) {
  const candidates = decision.candidates ?? [];
  const most = Math.max(1e-9, ...candidates.map((one) => Object.values(one.parts ?? {}).reduce((sum, part) => sum + part, 0)));
  const names = [...new Set(candidates.flatMap((one) => Object.keys(one.parts ?? {})))];
  return (
    <section class="why" aria-label="Decision of the router">
      <p>
        Policy <b>{decision.policy}</b>
        {decision.reason ? `: ${decision.reason}.` : <>: the lowest cost wins, in {decision.unit}. The prompt has {decision.num_tokens} tokens, {decision.num_blocks ?? 0} full blocks.</>}
        {(decision.num_candidates ?? 0) > candidates.length && <span class="muted"> The {candidates.length} best of {decision.num_candidates} candidates.</span>}
      </p>
      {names.length > 0 && <p class="legend muted small">{names.map((name, place) => <span><i class={`swatch ${PART_CLASSES[place % 5]}`} />{name}</span>)}</p>}
      <div class="scroll" tabIndex={0} role="region" aria-label="Candidates">
        <table>
          <thead><tr><th>Candidate</th><th class="num">Cost</th><th>Its parts</th><th class="num">Blocks cached</th><th class="num">In flight there</th></tr></thead>
          <tbody>
            {candidates.map((one) => (
              <tr class={chosen.includes(one.instance) ? "chosen" : ""} data-candidate={one.instance}>
                <td><code title={one.instance}>{short(one.instance)}{one.dp_rank ? ` rank ${one.dp_rank}` : ""}</code> {chosen.includes(one.instance) && <b class="good">chosen</b>}</td>
                <td class="num">{one.cost === undefined ? "–" : one.cost.toFixed(1)}</td>
                <td>
                  <span class="stages" role="img" aria-label={Object.entries(one.parts ?? {}).map(([name, part]) => `${name} ${part.toFixed(1)}`).join(", ") || "none"} title={Object.entries(one.parts ?? {}).map(([name, part]) => `${name} ${part.toFixed(1)}`).join("\n")}>
                    {names.map((name, place) => <span class={PART_CLASSES[place % 5]} style={{ width: `${((one.parts?.[name] ?? 0) / most) * 100}%` }} />)}
                  </span>
                </td>
                <td class="num">{(one.cached_blocks ?? 0).toFixed(one.cached_blocks && !Number.isInteger(one.cached_blocks) ? 2 : 0)}{one.in_flight_blocks ? ` (+${one.in_flight_blocks} coming)` : ""}</td>
                <td class="num">{one.num_requests ?? 0}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </section>
  );
}
