import { useEffect, useState } from "preact/hooks";
import { ask, getJson, type UsageRow } from "./api";
import type { ViewProps } from "./main";
import { count, duration, Notice, percent, Tile } from "./parts";

const MAX_SHOWN = 200;

export function Usage({ session }: ViewProps) {
  const [rows, setRows] = useState<UsageRow[] | null>(null);
  const [problem, setProblem] = useState("");
  const [days, setDays] = useState("30");
  useEffect(() => {
    const load = () => {
      const since = new Date(Date.now() - (Number(days) - 1) * 86_400_000).toISOString().slice(0, 10); // today is the last of so many days
      return getJson<{ rows: UsageRow[] }>(`/usage?since=${since}`).then((page) => { setRows(page.rows); setProblem(""); }, (error: Error) => setProblem(error.message));
    };
    void load();
    const timer = setInterval(load, 10_000);
    return () => clearInterval(timer);
  }, [days]);
  async function save() {
    const text = await (await ask("/usage?format=csv")).text();
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
    link.download = "usage.csv";
    link.click();
    URL.revokeObjectURL(link.href);
  }
  if (problem) return <Notice kind="bad">{problem}</Notice>;
  if (!rows) return <p class="muted">Loading …</p>;
  const sum = (field: "num_requests" | "num_errors" | "prompt_tokens" | "cached_tokens" | "output_tokens") => rows.reduce((total, row) => total + row[field], 0);
  return (
    <>
      <div class="tools">
        <label>Days{" "}
          <select value={days} onChange={(event) => setDays(event.currentTarget.value)}>
            <option value="1">today</option><option value="7">7</option><option value="30">30</option><option value="401">all</option>
          </select>
        </label>
        <button type="button" onClick={() => void save().catch((error: Error) => setProblem(error.message))}>Save as CSV</button>
        {!session.keeps_usage && <span class="muted small">Since the start of this process; <code>--usage-file</code> keeps it over restarts.</span>}
      </div>
      <div class="tiles">
        <Tile name="Requests" value={count(sum("num_requests"))} note={`${count(sum("num_errors"))} failed`} />
        <Tile name="Prompt tokens" value={count(sum("prompt_tokens"))} note={`${percent(sum("prompt_tokens") ? sum("cached_tokens") / sum("prompt_tokens") : null)} cached`} />
        <Tile name="Output tokens" value={count(sum("output_tokens"))} />
      </div>
      {rows.length > 0 && (
        <div class="scroll" tabIndex={0} role="region" aria-label="Usage">
          <table>
            <caption>{rows.length > MAX_SHOWN ? `The first ${MAX_SHOWN} of ${rows.length} rows; the CSV has all` : "By day (UTC)"}</caption>
            <thead><tr><th>Day</th><th>Key</th><th>Tenant</th><th>Model</th><th>API</th><th class="num">Requests</th><th class="num">Failed</th><th class="num">Prompt</th><th class="num">Cached</th><th class="num">Output</th><th class="num">Mean time</th></tr></thead>
            <tbody>
              {rows.slice(0, MAX_SHOWN).map((row) => (
                <tr><td>{row.day}</td><td>{row.key || "–"}</td><td>{row.tenant || "–"}</td><td>{row.model}</td><td>{row.api}</td><td class="num">{count(row.num_requests)}</td><td class="num">{count(row.num_errors)}</td><td class="num">{count(row.prompt_tokens)}</td><td class="num">{count(row.cached_tokens)}</td><td class="num">{count(row.output_tokens)}</td><td class="num">{duration((row.duration_s / row.num_requests) * 1000)}</td></tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </>
  );
}
