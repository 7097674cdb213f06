// The one way to the server: requests with the API key of this tab, and the event stream that opens itself again.

const KEY = "dynamo-api-key";

export interface Session {
  key: string;
  may_administer: boolean;
  version: string;
  process: string;
  router_mode: string;
  started_at: number;
  keeps_usage: boolean;
}

export interface Worker {
  instance: string;
  model: string;
  role: string;
  endpoint: string;
  address: string;
  state?: "ready" | "down" | "draining" | "asleep" | "gone";
  since?: number;
  num_requests?: number;
  num_running?: number;
  num_waiting?: number;
  kv_active_blocks?: number;
  kv_total_blocks?: number;
  hit_rate?: number;
  loras?: string[];
  tiers?: string[];
}

export interface Process {
  instance: string;
  kind: "frontend" | "router";
  namespace: string;
  address: string;
  host?: string;
  router_mode?: string;
  state?: "ready" | "draining";
  is_self?: boolean;
}

export interface Transfer {
  prefill: string;
  decode: string;
  num_open: number;
  num_recent: number;
}

export interface Topology {
  router_mode: string;
  num_open_requests: number;
  total: number;
  num_by_state: Record<string, number>;
  num_by_role: Record<string, number>;
  starting: { model: string; namespace: string; estimate_s: number }[];
  workers: Worker[];
  num_processes: Record<string, number>;
  processes: Process[];
  transfers: Transfer[];
}

export interface Candidate {
  instance: string;
  dp_rank?: number;
  cost?: number;
  parts?: Record<string, number>;
  cached_blocks?: number;
  in_flight_blocks?: number;
  num_requests?: number;
}

export interface Decision {
  kind?: "model" | "prefill" | "migration"; // absent: the worker
  policy: string;
  outcome?: string;
  unit?: string;
  reason?: string;
  num_tokens?: number;
  num_blocks?: number;
  num_candidates?: number;
  candidates?: Candidate[];
}

export interface RequestRow {
  id: string;
  model: string;
  endpoint: string;
  request_type: string;
  state: string;
  arrived_at: number;
  key?: string;
  error?: string;
  prepare_ms?: number;
  route_ms?: number;
  prefill_ms?: number;
  decode_ms?: number;
  ttft_ms?: number;
  total_ms?: number;
  prompt_tokens?: number;
  cached_tokens?: number;
  tier_tokens?: Record<string, number>;
  output_tokens?: number;
  worker?: string;
  prefill_worker?: string;
  num_migrations?: number;
  decisions?: Decision[];
}

export interface RequestPage {
  total: number;
  num_open: number;
  rows: RequestRow[];
}

export interface Point {
  at: number;
  requests_per_s: number;
  errors_per_s: number;
  input_tokens_per_s: number;
  output_tokens_per_s: number;
  cached_share: number | null;
  num_inflight: number;
  num_queued: number;
  ttft_p50: number | null;
  ttft_p95: number | null;
  itl_p50: number | null;
  itl_p95: number | null;
}

export interface MetricPage {
  model: string;
  models: string[];
  interval_s: number;
  points: Point[];
}

export interface CachePage {
  is_indexed: boolean;
  prompt_tokens: number;
  cached_tokens: number;
  tier_tokens: Record<string, number>;
  prefixes: {
    id: string;
    model: string;
    num_blocks: number;
    num_prompts: number;
    blocks_by_tier: Record<string, Record<string, number>>;
  }[];
}

export interface ModelRow {
  name: string;
  kind: string;
  num_workers: number;
  num_prefill_workers?: number;
  context_length?: number;
  kv_cache_block_size?: number;
  total_kv_blocks?: number;
  max_num_seqs?: number;
  aliases?: string[];
  loras?: string[];
  base?: string;
  created?: number;
  tool_call_parser?: string;
  reasoning_parser?: string;
  supports_logprobs?: boolean;
  supports_guided?: boolean;
  files?: Record<string, string>;
  chat_template?: string;
  is_on_demand?: boolean;
  phase?: "unloaded" | "loading" | "loaded" | "unloading";
  is_pinned?: boolean;
  is_changeable?: boolean;
  estimate_s?: number;
  failure?: string;
}

export interface UsageRow {
  day: string;
  key: string;
  tenant: string;
  model: string;
  api: string;
  num_requests: number;
  num_errors: number;
  prompt_tokens: number;
  cached_tokens: number;
  output_tokens: number;
  duration_s: number;
}

export interface WorkerCounts {
  prefill: number;
  decode: number;
}

export interface PlannerDecision {
  time: number;
  outcome: string;
  is_leader: boolean;
  present: WorkerCounts;
  replicas: WorkerCounts;
  reason: string;
  requests_per_s?: number;
  predicted_requests_per_s?: number;
  ttft_ms?: number;
  kv_usage?: number;
  num_running?: number;
  num_waiting?: number;
}

export interface PlannerReport {
  namespace: string;
  policy: string;
  mode: string;
  interval_s: number;
  decisions: PlannerDecision[];
  what_if?: PlannerDecision[] | null;
}

export interface LogLine {
  number: number;
  at: number;
  level: string;
  target: string;
  message: string;
  request_id?: string;
}

export class ApiError extends Error {
  constructor(
    readonly status: number,
    message: string,
  ) {
    super(message);
  }
}

let onSignedOut: () => void = () => {};

export function whenSignedOut(callback: () => void): void {
  onSignedOut = callback;
}

export function apiKey(): string {
  return sessionStorage.getItem(KEY) ?? "";
}

export function setApiKey(key: string): void {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

export async function ask(path: string, options: RequestInit = {}): Promise<Response> {
  const headers = new Headers(options.headers);
  if (apiKey()) headers.set("authorization", `Bearer ${apiKey()}`);
  const answer = await fetch(path, { ...options, headers });
  if (answer.ok) return answer;
  if (answer.status === 401) onSignedOut();
  let message = `${answer.status} ${answer.statusText}`;
  try {
    message = (await answer.json()).error.message;
  } catch {
    // a proxy's page, not ours
  }
  throw new ApiError(answer.status, message);
}

export async function getJson<T>(path: string): Promise<T> {
  return (await ask(path)).json() as Promise<T>;
}

/** Yields the data of each server-sent event, with its name. */
export async function* readEvents(answer: Response): AsyncGenerator<{ name: string; data: string }> {
  const reader = answer.body!.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    waiting += value;
    const parts = waiting.split("\n\n");
    waiting = parts.pop()!;
    for (const part of parts) {
      let name = "message";
      const data: string[] = [];
      for (const line of part.split("\n")) {
        if (line.startsWith("event: ")) name = line.slice(7);
        else if (line.startsWith("data: ")) data.push(line.slice(6));
      }
      if (data.length) yield { name, data: data.join("\n") };
    }
  }
}

/** Follows views until the signal; after a broken connection it opens the stream again. */
export async function follow(
  views: string[],
  signal: AbortSignal,
  onEvent: (name: string, value: any) => void,
  onState: (isConnected: boolean, problem: string) => void,
): Promise<void> {
  let pauseMs = 500;
  while (!signal.aborted) {
    let problem = "the frontend has closed the stream";
    try {
      const answer = await ask(`/console/api/events?views=${views.join(",")}`, { signal });
      onState(true, "");
      for await (const event of readEvents(answer)) {
        pauseMs = 500;
        onEvent(event.name, JSON.parse(event.data));
      }
    } catch (error) {
      if (signal.aborted) return;
      problem = error instanceof ApiError ? error.message : "the frontend cannot be reached";
      if (error instanceof ApiError && [400, 401, 403].includes(error.status)) {
        onState(false, problem);
        return;
      }
    }
    onState(false, problem);
    await new Promise((resolve) => setTimeout(resolve, pauseMs));
    pauseMs = Math.min(pauseMs * 2, 8000);
  }
}
