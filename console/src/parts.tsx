// What several views share: formats of numbers, tiles, notices, and the hook that follows live views.

import type { ComponentChildren } from "preact";
import { useEffect, useState } from "preact/hooks";
import { follow } from "./api";

export function count(value: number | undefined | null): string {
  if (value === undefined || value === null) return "–";
  if (Math.abs(value) >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
  if (Math.abs(value) >= 1e4) return `${(value / 1e3).toFixed(1)} k`;
  return Number.isInteger(value) ? String(value) : value.toFixed(1);
}

export function duration(ms: number | undefined | null): string {
  if (ms === undefined || ms === null) return "–";
  if (ms < 10) return `${ms.toFixed(1)} ms`;
  if (ms < 1000) return `${Math.round(ms)} ms`;
  if (ms < 59_995) return `${(ms / 1000).toFixed(2)} s`;
  const seconds = Math.round(ms / 1000);
  return `${Math.floor(seconds / 60)} min ${seconds % 60} s`;
}

export function percent(share: number | undefined | null): string {
  return share === undefined || share === null ? "–" : `${Math.round(share * 100)} %`;
}

export function clock(seconds: number): string {
  return new Date(seconds * 1000).toLocaleTimeString([], { hour12: false });
}

export function short(instance: string | undefined): string {
  return instance ? instance.slice(-6) : "–";
}

export function Tile(props: { name: string; value: string; note?: string }) {
  return (
    <div class="tile">
      <span class="tile-name">{props.name}</span>
      <span class="tile-value" data-tile={props.name}>{props.value}</span>
      {props.note && <span class="muted">{props.note}</span>}
    </div>
  );
}

export function Notice(props: { children: ComponentChildren; kind?: "bad" }) {
  return <p class={`notice ${props.kind ?? ""}`} role="status">{props.children}</p>;
}

export function Bar(props: { share: number; label: string }) {
  return (
    <span class="bar" role="img" aria-label={props.label} title={props.label}>
      <span class="bar-fill" style={{ width: `${Math.min(100, Math.max(0, props.share * 100))}%` }} />
    </span>
  );
}

const kept = new Map<string, unknown>();
const redraws = new Set<() => void>();

/** State of a view that outlives it: as long as the page, or until `forget`. */
export function useKept<T>(name: string, initial: T): [T, (next: T | ((old: T) => T)) => void] {
  const [, redraw] = useState({});
  useEffect(() => {
    const draw = () => redraw({});
    redraws.add(draw);
    return () => {
      redraws.delete(draw);
    };
  }, []);
  const read = () => (kept.has(name) ? (kept.get(name) as T) : initial);
  const change = (next: T | ((old: T) => T)) => {
    kept.set(name, typeof next === "function" ? (next as (old: T) => T)(read()) : next);
    for (const draw of redraws) draw();
  };
  return [read(), change];
}

export function recall<T>(name: string): T | undefined {
  return kept.get(name) as T | undefined;
}

export function forget() {
  kept.clear();
  for (const draw of redraws) draw();
}

export interface Live<T> {
  value: T;
  isConnected: boolean;
  problem: string;
}

/** The latest value of each of these views, from one event stream that lives as long as the component. */
export function useLive<T extends object>(views: string[], first: T, join?: (old: T, name: string, value: any) => T): Live<T> {
  const [live, setLive] = useState<Live<T>>({ value: first, isConnected: true, problem: "" });
  useEffect(() => {
    const abort = new AbortController();
    void follow(
      views,
      abort.signal,
      (name, value) =>
        setLive((old) => ({
          ...old,
          value: join ? join(old.value, name, value) : { ...old.value, [name]: value },
        })),
      (isConnected, problem) => setLive((old) => ({ ...old, isConnected, problem })),
    );
    return () => abort.abort();
  }, []);
  return live;
}

export function Offline(props: { live: { isConnected: boolean; problem: string } }) {
  return props.live.isConnected ? null : <Notice kind="bad">Not live: {props.live.problem}.</Notice>;
}
