import { useMemo } from "preact/hooks";
import type { Process, Topology as Page, Transfer, Worker } from "./api";
import type { ViewProps } from "./main";
import { Bar, clock, count, Notice, Offline, percent, short, Tile, useLive } from "./parts";

const MAX_DRAWN = 24;
const MAX_PROCESSES_DRAWN = 8;
const ROW = 64;
const STATES = { down: "connection broke", draining: "finishes its requests", asleep: "asleep until it is woken", gone: "left or lost" };

export function Topology(_: ViewProps) {
  const live = useLive<{ topology?: Page }>(["topology"], {});
  const page = live.value.topology;
  if (!page) return <><Offline live={live} /><p class="muted">Waiting for the first frame …</p></>;
  const roles = Object.entries(page.num_by_role).map(([role, number]) => `${number} ${role}`).join(", ");
  const states = page.num_by_state;
  return (
    <>
      <Offline live={live} />
      <div class="tiles">
        <Tile name="Workers" value={count(states.ready ?? 0)} note={roles || "none"} />
        <Tile name="Leaving" value={count((states.draining ?? 0) + (states.asleep ?? 0))} note={`${states.draining ?? 0} draining, ${states.asleep ?? 0} asleep`} />
        <Tile name="Lost" value={count((states.down ?? 0) + (states.gone ?? 0))} note="in the last minute" />
        <Tile name="Starting" value={count(page.starting.length)} note={page.starting.map((one) => `${one.model}, ${Math.round(one.estimate_s)} s`).join("; ")} />
        <Tile name="Frontends" value={count(page.num_processes.frontend ?? 0)} note={`${page.num_processes.router ?? 0} routers of their own`} />
        <Tile name="Requests in flight" value={count(page.num_open_requests)} note={`here; router mode ${page.router_mode}`} />
      </div>
      {page.total === 0 && <Notice>No worker is registered.</Notice>}
      {page.workers.length > 0 && page.workers.length <= MAX_DRAWN && <Drawing page={page} />}
      {page.workers.length > 0 && <Table workers={page.workers} total={page.total} />}
      {page.transfers.length > 0 && <Transfers transfers={page.transfers} />}
      <Processes processes={page.processes} total={(page.num_processes.frontend ?? 0) + (page.num_processes.router ?? 0)} />
    </>
  );
}

interface Place {
  x: number;
  y: number;
}

function placed<T>(column: T[], x: number, height: number): [T, Place][] {
  return column.map((each, row) => [each, { x, y: height / 2 + (row - (column.length - 1) / 2) * ROW }]);
}

function Drawing({ page }: { page: Page }) {
  const processes = page.processes.slice(0, MAX_PROCESSES_DRAWN);
  const prefill = page.workers.filter((worker) => worker.role === "prefill");
  const others = page.workers.filter((worker) => worker.role !== "prefill");
  const columns = [prefill, others].filter((column) => column.length);
  const height = Math.max(120, Math.max(processes.length, ...columns.map((column) => column.length)) * ROW + 16);
  const places = useMemo(
    () =>
      new Map<string, Place>(
        columns.flatMap((column, number) => placed(column, columns.length === 1 ? 560 : 350 + number * 320, height).map(([worker, place]) => [worker.instance, place] as [string, Place])),
      ),
    [height, page.workers.map((worker) => worker.instance + worker.role).join()],
  );
  const nodes = placed(processes, 20, height);
  const own = nodes.find(([process]) => process.is_self)?.[1] ?? { x: 20, y: height / 2 };
  return (
    <svg class="drawing" viewBox={`0 0 900 ${height}`} role="img" aria-label={`${page.processes.length} frontends and routers, and ${page.workers.length} workers; the tables below say the same`}>
      {page.workers.map((worker) => {
        const { x, y } = places.get(worker.instance)!;
        return (
          <path
            class={`link ${worker.state ?? "ready"} ${worker.num_requests ? "busy" : ""}`}
            d={`M 190 ${own.y} C 280 ${own.y}, ${x - 110} ${y}, ${x} ${y}`}
            stroke-width={1.5 + Math.min(6, Math.sqrt(worker.num_requests ?? 0))}
          />
        );
      })}
      {page.transfers.map((transfer) => {
        const [from, to] = [places.get(transfer.prefill), places.get(transfer.decode)];
        if (!from || !to) return null;
        return (
          <g class="transfer" data-transfer={`${transfer.prefill}-${transfer.decode}`}>
            <title>{`KV blocks of ${transfer.num_open} requests in flight and ${transfer.num_recent} of the last minute`}</title>
            <path class={`link ${transfer.num_open ? "busy" : ""}`} d={`M ${from.x + 210} ${from.y} L ${to.x} ${to.y}`} stroke-width="2" />
            <text class="detail" x={(from.x + 210 + to.x) / 2} y={(from.y + to.y) / 2 - 6} text-anchor="middle">KV × {transfer.num_open + transfer.num_recent}</text>
          </g>
        );
      })}
      {nodes.map(([process, { x, y }]) => (
        <g class={process.state ?? "ready"}>
          <title>{process.address}</title>
          <rect class={`node ${process.is_self ? "self" : ""}`} x={x} y={y - 25} width="170" height="50" rx="10" />
          <text class="name" x={x + 16} y={y - 2}>{process.is_self ? "this frontend" : process.kind}</text>
          <text class="detail" x={x + 16} y={y + 15}>{(process.is_self ? location.host : process.host || process.address).slice(0, 22)}</text>
        </g>
      ))}
      {page.workers.map((worker) => {
        const { x, y } = places.get(worker.instance)!;
        const state = worker.state ?? "ready";
        const share = worker.kv_total_blocks ? (worker.kv_active_blocks ?? 0) / worker.kv_total_blocks : 0;
        return (
          <g class={state}>
            <title>{worker.instance}</title>
            <rect class="node" x={x} y={y - 25} width="210" height="50" rx="10" />
            <rect class="level" x={x + 1} y={y + 20} width={Math.max(0, 208 * share)} height="4" />
            <circle class="lamp" cx={x + 16} cy={y - 7} r="5" />
            <text class="name" x={x + 28} y={y - 2}>{worker.role} {short(worker.instance)}</text>
            <text class="detail" x={x + 16} y={y + 15}>{state === "ready" ? `${worker.num_requests ?? 0} in flight · KV ${percent(share)}` : STATES[state]}</text>
          </g>
        );
      })}
    </svg>
  );
}

function Processes({ processes, total }: { processes: Process[]; total: number }) {
  return (
    <div class="scroll below-table" tabIndex={0} role="region" aria-label="Frontends and routers">
      <table class="stacked">
        <caption>{processes.length < total ? `${processes.length} of ${total} frontends and routers` : "Frontends, and routers that are processes of their own"}</caption>
        <thead><tr><th>Process</th><th>Kind</th><th>State</th><th>Host</th><th>Address</th><th>Namespace</th><th>Router mode</th></tr></thead>
        <tbody>
          {processes.map((process) => (
            <tr data-process={process.instance} data-kind={process.kind}>
              <td data-name="Process"><code title={process.instance}>{short(process.instance)}</code>{process.is_self && <span class="muted"> this one</span>}</td>
              <td data-name="Kind">{process.kind}</td>
              <td data-name="State"><span class={`state ${process.state ?? "ready"}`}>{process.state ?? "ready"}</span></td>
              <td data-name="Host">{process.host || "–"}</td>
              <td data-name="Address" class="muted small">{process.address}</td>
              <td data-name="Namespace">{process.namespace || "all"}</td>
              <td data-name="Router mode">{process.router_mode || "–"}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function Transfers({ transfers }: { transfers: Transfer[] }) {
  return (
    <div class="scroll below-table" tabIndex={0} role="region" aria-label="Transfers">
      <table class="stacked">
        <caption>Prompts that one worker computed and another one decodes, of this frontend's requests</caption>
        <thead><tr><th>Prefill worker</th><th>Decode worker</th><th class="num">In flight</th><th class="num">Last minute</th></tr></thead>
        <tbody>
          {transfers.map((transfer) => (
            <tr data-pair={`${transfer.prefill}-${transfer.decode}`}>
              <td data-name="Prefill worker"><code title={transfer.prefill}>{short(transfer.prefill)}</code></td>
              <td data-name="Decode worker"><code title={transfer.decode}>{short(transfer.decode)}</code></td>
              <td data-name="In flight" class="num">{transfer.num_open}</td>
              <td data-name="Last minute" class="num">{transfer.num_recent}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function Table({ workers, total }: { workers: Worker[]; total: number }) {
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label="Workers">
      <table class="stacked">
        <caption>{workers.length < total ? `The first ${workers.length} of ${total} workers` : "All workers"}</caption>
        <thead>
          <tr><th>Worker</th><th>State</th><th>Model</th><th>Role</th><th class="num">In flight here</th><th class="num">Running</th><th class="num">Waiting</th><th>KV blocks in use</th><th class="num">Hit rate</th><th>Tiers</th><th>Address</th><th>Seen since</th></tr>
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
              <td data-name="Tiers" class="small">{worker.tiers?.join(", ") || "–"}</td>
              <td data-name="Address" class="muted small">{worker.address || "–"}</td>
              <td data-name="Seen since" class="muted small">{worker.since ? clock(worker.since) : "–"}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
