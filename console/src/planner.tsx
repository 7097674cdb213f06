import { useEffect, useState } from "preact/hooks";
import { getJson, type PlannerDecision, type PlannerReport, type WorkerCounts } from "./api";
import type { ViewProps } from "./main";
import { clock, count, duration, Notice, percent, Tile } from "./parts";

const PATH = "/console/api/planner";
const MAX_SHOWN = 60;

export function Planner(_: ViewProps) {
  const [planners, setPlanners] = useState<PlannerReport[] | null>(null);
  const [problem, setProblem] = useState("");
  useEffect(() => {
    const load = () => getJson<{ planners: PlannerReport[] }>(PATH).then((page) => { setPlanners(page.planners); setProblem(""); }, (error: Error) => setProblem(error.message));
    void load();
    const timer = setInterval(load, 2000);
    return () => clearInterval(timer);
  }, []);
  if (problem) return <Notice kind="bad">{problem}</Notice>;
  if (!planners) return <p class="muted">Loading …</p>;
  if (!planners.length) return <div class="card"><Notice>No planner runs. <code>dynamo serve --planner</code> starts one, and so does <code>python -m dynamo.planner</code>.</Notice></div>;
  const acting = firstOfEach(planners);
  return (
    <>
      {planners.length > acting.length && <p class="muted small">{planners.length - acting.length} more stand by; shown is the one that acts.</p>}
      {acting.map((planner) => (
        <section key={planner.namespace} data-planner={planner.namespace}>
          {acting.length > 1 && <h2>Namespace {planner.namespace}</h2>}
          <Report planner={planner} />
          <WhatIf namespace={planner.namespace} />
          <Decisions caption="Decisions, the latest first" rows={planner.decisions.slice(0, MAX_SHOWN)} when={clock} />
        </section>
      ))}
    </>
  );
}

/** The planner of each namespace that acts, which the API names before those that stand by. */
function firstOfEach(planners: PlannerReport[]): PlannerReport[] {
  const found = new Map<string, PlannerReport>();
  for (const planner of planners) if (!found.has(planner.namespace)) found.set(planner.namespace, planner);
  return [...found.values()].sort((one, other) => (one.namespace < other.namespace ? -1 : 1));
}

function workers(counts: WorkerCounts, mode: string): string {
  return mode === "agg" ? String(counts.decode) : `${counts.prefill} prefill, ${counts.decode} decode`;
}

function Report({ planner }: { planner: PlannerReport }) {
  const last = planner.decisions[0];
  if (!last) return <Notice>The first decision comes after {count(planner.interval_s)} s.</Notice>;
  const first = last.ttft_ms === undefined ? "" : `first token ${duration(last.ttft_ms)}`;
  return (
    <div class="tiles">
      <Tile name="Workers" value={workers(last.present, planner.mode)} note="ready or starting" />
      <Tile name="Decision" value={last.outcome} note={`to ${workers(last.replicas, planner.mode)}; policy ${planner.policy}, every ${count(planner.interval_s)} s`} />
      <Tile name="Requests/s" value={last.requests_per_s === undefined ? "–" : last.requests_per_s.toFixed(2)} note={first} />
      <Tile name="Predicted/s" value={last.predicted_requests_per_s === undefined ? "–" : last.predicted_requests_per_s.toFixed(2)} note={last.predicted_requests_per_s === undefined ? "this policy predicts nothing" : ""} />
      <Tile name="KV cache in use" value={percent(last.kv_usage ?? 0)} note={`${last.num_running ?? 0} running, ${last.num_waiting ?? 0} waiting`} />
    </div>
  );
}

function WhatIf({ namespace }: { namespace: string }) {
  const [factor, setFactor] = useState("2");
  const [rows, setRows] = useState<PlannerDecision[] | null>(null);
  const [problem, setProblem] = useState("");
  async function simulate(event: Event) {
    event.preventDefault();
    try {
      const page = await getJson<{ planners: PlannerReport[] }>(`${PATH}?factor=${encodeURIComponent(factor)}`);
      const steps = page.planners.find((planner) => planner.namespace === namespace)?.what_if ?? null;
      setRows(steps);
      setProblem(steps ? "" : "Nothing was measured yet.");
    } catch (error) {
      setProblem((error as Error).message);
    }
  }
  return (
    <section aria-label="What if">
      <h2>What if the load were different?</h2>
      <form class="tools" onSubmit={simulate}>
        <label>Times the present load <input type="number" min="0" max="1000" step="any" value={factor} onInput={(event) => setFactor(event.currentTarget.value)} /></label>
        <button type="submit">Simulate</button>
        <span class="muted small">The planner's own policy, over simulated workers, in virtual time.</span>
      </form>
      {problem && <Notice kind="bad">{problem}</Notice>}
      {rows && <Decisions caption={`Changes under ${factor} × the load`} rows={rows} when={(seconds) => seconds === 0 ? "at once" : `after ${duration(seconds * 1000)}`} />}
    </section>
  );
}

function Decisions(props: { caption: string; rows: PlannerDecision[]; when: (seconds: number) => string }) {
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label={props.caption}>
      <table>
        <caption>{props.caption}</caption>
        <thead><tr><th>Time</th><th>Decision</th><th class="num">Prefill</th><th class="num">Decode</th><th class="num">Requests/s</th><th class="num">KV in use</th><th>Why</th></tr></thead>
        <tbody>
          {props.rows.map((row) => (
            <tr data-decision={row.time}>
              <td>{props.when(row.time)}</td>
              <td>{row.outcome}{row.is_leader ? "" : ", standing by"}</td>
              <td class="num">{change(row, "prefill")}</td>
              <td class="num">{change(row, "decode")}</td>
              <td class="num">{row.requests_per_s === undefined ? "–" : row.requests_per_s.toFixed(2)}</td>
              <td class="num">{percent(row.kv_usage ?? 0)}</td>
              <td class="reason">{row.reason}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function change(row: PlannerDecision, pool: "prefill" | "decode"): string {
  const [before, after] = [row.present[pool], row.replicas[pool]];
  return before === after ? String(after) : `${before} → ${after}`;
}
