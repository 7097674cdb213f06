import { useMemo } from "preact/hooks";
import type { Topology as Page, Worker } from "./api";
import type { ViewProps } from "./main";
import { Bar, clock, count, Notice, Offline, percent, short, Tile, useLive } from "./parts";

const MAX_DRAWN = 24;

export function Topology(_: ViewProps) {
  const live = useLive<{ topology?: Page }>(["topology"], {});
  const page = live.value.topology;
  if (!page) return <><Offline live={live} /><p class="muted">Waiting for the first frame …</p></>;
  const roles = Object.entries(page.num_by_role).map(([role, number]) => `${number} ${role}`).join(", ");
  return (
    <>
      <Offline live={live} />
      <div class="tiles">
        <Tile name="Workers" value={count(page.num_by_state.ready ?? 0)} note={roles || "none"} />
        <Tile name="Lost" value={count((page.num_by_state.down ?? 0) + (page.num_by_state.gone ?? 0))} note="in the last minute" />
        <Tile name="Starting" value={count(page.starting.length)} note={page.starting.map((one) => `${one.model}, ${Math.round(one.estimate_s)} s`).join("; ")} />
        <Tile name="Requests in flight" value={count(page.num_open_requests)} note={`router mode ${page.router_mode}`} />
      </div>
      {page.total === 0 && <Notice>No worker is registered.</Notice>}
      {page.workers.length > 0 && page.workers.length <= MAX_DRAWN && <Drawing page={page} />}
      {page.workers.length > 0 && <Table workers={page.workers} total={page.total} />}
    </>
  );
}

function Drawing({ page }: { page: Page }) {
  const prefill = page.workers.filter((worker) => worker.role === "prefill");
  const others = page.workers.filter((worker) => worker.role !== "prefill");
  const columns = [prefill, others].filter((column) => column.length);
  const rows = Math.max(...columns.map((column) => column.length));
  const height = Math.max(120, rows * 64 + 16);
  const places = useMemo(() => {
    const found = new Map<string, { x: number; y: number }>();
    columns.forEach((column, number) =>
      column.forEach((worker, row) =>
        found.set(worker.instance, {
          x: columns.length === 1 ? 560 : 360 + number * 330,
          y: height / 2 + (row - (column.length - 1) / 2) * 64,
        }),
      ),
    );
    return found;
  }, [page.workers.map((worker) => worker.instance + worker.role).join()]);
  return (
    <svg class="drawing" viewBox={`0 0 900 ${height}`} role="img" aria-label={`This frontend and ${page.workers.length} workers; the table below says the same`}>
      {page.workers.map((worker) => {
        const { x, y } = places.get(worker.instance)!;
        return (
          <path
            class={`link ${worker.state ?? "ready"} ${worker.num_requests ? "busy" : ""}`}
            d={`M 190 ${height / 2} C 280 ${height / 2}, ${x - 110} ${y}, ${x} ${y}`}
            stroke-width={1.5 + Math.min(6, Math.sqrt(worker.num_requests ?? 0))}
          />
        );
      })}
      <g>
        <rect class="node self" x="20" y={height / 2 - 30} width="170" height="60" rx="10" />
        <text class="name" x="36" y={height / 2 - 5}>frontend</text>
        <text class="detail" x="36" y={height / 2 + 15}>{location.host.slice(0, 22)}</text>
      </g>
      {page.workers.map((worker) => {
        const { x, y } = places.get(worker.instance)!;
        const share = worker.kv_total_blocks ? (worker.kv_active_blocks ?? 0) / worker.kv_total_blocks : 0;
        return (
          <g class={worker.state ?? "ready"}>
            <title>{worker.instance}</title>
            <rect class="node" x={x} y={y - 25} width="210" height="50" rx="10" />
            <rect class="level" x={x + 1} y={y + 20} width={Math.max(0, 208 * share)} height="4" />
            <circle class="lamp" cx={x + 16} cy={y - 7} r="5" />
            <text class="name" x={x + 28} y={y - 2}>{worker.role} {short(worker.instance)}</text>
            <text class="detail" x={x + 16} y={y + 15}>
              {(worker.state ?? "ready") === "ready" ? `${worker.num_requests ?? 0} in flight · KV ${percent(share)}` : worker.state === "gone" ? "left or lost" : "connection broke"}
            </text>
          </g>
        );
      })}
    </svg>
  );
}

function Table({ workers, total }: { workers: Worker[]; total: number }) {
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label="Workers">
      <table class="stacked">
        <caption>{workers.length < total ? `The first ${workers.length} of ${total} workers` : "All workers"}</caption>
        <thead>
          <tr><th>Worker</th><th>State</th><th>Model</th><th>Role</th><th class="num">In flight here</th><th class="num">Running</th><th class="num">Waiting</th><th>KV blocks in use</th><th class="num">Hit rate</th><th>Address</th><th>Seen since</th></tr>
        </thead>
        <tbody>
          {workers.map((worker) => (
            <tr data-worker={worker.instance} data-state={worker.state ?? "ready"}>
              <td data-name="Worker"><code title={worker.instance}>{short(worker.instance)}</code></td>
              <td data-name="State"><span class={`state ${worker.state ?? "ready"}`}>{worker.state ?? "ready"}</span></td>
              <td data-name="Model">{worker.model}{worker.loras?.length ? <span class="muted"> + {worker.loras.join(", ")}</span> : null}</td>
              <td data-name="Role">{worker.role}</td>
              <td data-name="In flight here" class="num">{worker.num_requests ?? 0}</td>
              <td data-name="Running" class="num">{count(worker.num_running)}</td>
              <td data-name="Waiting" class="num">{count(worker.num_waiting)}</td>
              <td data-name="KV blocks in use">{worker.kv_total_blocks ? <><Bar share={(worker.kv_active_blocks ?? 0) / worker.kv_total_blocks} label={`${worker.kv_active_blocks} of ${worker.kv_total_blocks} blocks`} /> <span class="muted small">{worker.kv_active_blocks} / {worker.kv_total_blocks}</span></> : "–"}</td>
              <td data-name="Hit rate" class="num">{percent(worker.hit_rate)}</td>
              <td data-name="Address" class="muted small">{worker.address || "–"}</td>
              <td data-name="Seen since" class="muted small">{worker.since ? clock(worker.since) : "–"}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
