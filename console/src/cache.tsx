import type { CachePage } from "./api";
import type { ViewProps } from "./main";
import { Bar, count, Notice, Offline, percent, short, Tile, useLive } from "./parts";

export function Cache(_: ViewProps) {
  const live = useLive<{ cache?: CachePage }>(["cache"], {});
  const page = live.value.cache;
  if (!page) return <><Offline live={live} /><p class="muted">Waiting for the first frame …</p></>;
  const workers = [...new Set(page.prefixes.flatMap((prefix) => Object.values(prefix.blocks_by_tier).flatMap(Object.keys)))].sort();
  const tiers = Object.entries(page.tier_tokens).map(([tier, tokens]) => `${count(tokens)} on ${tier}`).join(", ");
  return (
    <>
      <Offline live={live} />
      <div class="tiles">
        <Tile name="Prompt tokens" value={count(page.prompt_tokens)} note="of the last requests" />
        <Tile name="Hits" value={percent(page.prompt_tokens ? page.cached_tokens / page.prompt_tokens : null)} note={`${count(page.cached_tokens)} tokens were cached`} />
        <Tile name="Slower tiers" value={count(Object.values(page.tier_tokens).reduce((sum, tokens) => sum + tokens, 0))} note={tiers || "none of them"} />
      </div>
      {!page.is_indexed && <Notice>This frontend does not know which worker has which block. Start it with <code>--router-mode kv</code>.</Notice>}
      {page.is_indexed && !page.prefixes.length && <Notice>No recent prompt has a full block yet. Prompts count while a console is open; short ones have no full block.</Notice>}
      {page.prefixes.length > 0 && (
        <div class="scroll" tabIndex={0} role="region" aria-label="Prefixes">
          <table>
            <caption>Prefixes of recent prompts, first those that several share; a full bar is a worker that has all blocks</caption>
            <thead><tr><th>Prefix</th><th>Model</th><th class="num">Blocks</th><th class="num">Prompts</th>{workers.map((worker) => <th><code title={worker}>{short(worker)}</code></th>)}</tr></thead>
            <tbody>
              {page.prefixes.map((prefix) => (
                <tr data-prefix={prefix.id}>
                  <td><code>{prefix.id.slice(0, 8)}</code></td>
                  <td>{prefix.model}</td>
                  <td class="num">{prefix.num_blocks}</td>
                  <td class="num">{prefix.num_prompts}</td>
                  {workers.map((worker) => (
                    <td>
                      {Object.entries(prefix.blocks_by_tier).filter(([, held]) => held[worker]).map(([tier, held]) => (
                        <span class={`tier tier-${tier}`}><Bar share={held[worker]! / prefix.num_blocks} label={`${held[worker]} blocks on ${tier}`} /> <span class="small muted">{held[worker]} {tier}</span></span>
                      ))}
                    </td>
                  ))}
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </>
  );
}
