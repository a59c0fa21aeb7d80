// One token, one layer and one KV head at a time: pointer, keys, links, and the start.

function summaryOf(layer) {
  if (!layer.geometry) return `Layer ${layer.layer} is dense: each token attends to all before it.`;
  if (!layer.num_blocks) return `Layer ${layer.layer} chooses no blocks; its branches are ${layer.branches.join(" and ")}.`;
  if (!arrays[layer.layer]) return "Unpacking\u2026";
  const chosen = [];
  for (let block = 0; block <= ownOf(layer, state.token); block++) if (isChosen(layer, state.token, state.group, block)) chosen.push(block);
  return `In block ${ownOf(layer, state.token)}. Layer ${layer.layer}, KV head ${state.group} chose blocks ${chosen.join(", ")}.`;
}

function linkOf() {
  return `#t=${state.token}&l=${state.layer}&g=${state.group}`;
}

// an invisible character could reverse the words after it
const escaped = (one) => (HIDDEN.test(one) ? `\\u${one.charCodeAt(0).toString(16).padStart(4, "0")}` : one);

function fillTitle() {
  const piece = facts.token_texts[state.token];
  const shown = piece ? [...JSON.stringify(piece)].map(escaped).join("") : "more of the character before";
  const link = element("a", { href: linkOf() }, "link");
  const words = `Token ${state.token}: ${shown}, id ${facts.token_ids[state.token]}${state.pinned ? ", pinned" : ""} `;
  at("token").replaceChildren(words, link);
}

function showToken() {
  const layer = layers[state.layer];
  lightBlocks(layer);
  if (state.token === null) return;
  fillTitle();
  at("summary").textContent = summaryOf(layer);
  drawMap();
  if (!arrays[state.layer]) return;
  for (const { canvas, name, group } of strips) drawStrip(canvas, layer, name, group);
  for (const strip of at("blocks").children) strip.classList.toggle("current", Number(strip.dataset.group) === state.group);
  fillGates(layer);
  fillTable(layer);
}

function point(token) {
  if (state.token !== null) tokens[state.token].classList.remove("here");
  state.token = token;
  tokens[token].classList.add("here");
  showToken();
}

function pin(token) {
  state.pinned = true;
  point(token);
  tokens[token].scrollIntoView({ block: "nearest" });
  keepLink();
}

function choose(layer, group) {
  const isOther = layer !== state.layer;
  state.layer = layer;
  state.group = Math.max(0, Math.min(group, linesOf(layers[layer]) - 1));
  if (isOther) showLayer();
  at("group").value = state.group;
  showToken();
  keepLink();
}

function showLayer() {
  const layer = layers[state.layer];
  at("layer").value = state.layer;
  const groups = [...Array(linesOf(layer)).keys()];
  at("group").replaceChildren(...groups.map((group) => element("option", { value: group }, `${group}`)));
  at("group").disabled = !layer.num_blocks;
  for (const label of at("rows").children) label.classList.toggle("current", Number(label.dataset.layer) === state.layer);
  buildStrips(layer);
  buildGates(layer);
  fillTable(layer);
  fillHistograms(layer);
  load(state.layer);
}

// browsers refuse many changes of the address in a short time
let waiting = null;

function keepLink() {
  clearTimeout(waiting);
  waiting = setTimeout(() => {
    if (state.pinned) history.replaceState(null, "", linkOf());
  }, 200);
}

function followLink() {
  const asked = new URLSearchParams(location.hash.slice(1));
  const number = (name, end) => (/^\d{1,9}$/.test(asked.get(name) || "") && Number(asked.get(name)) < end ? Number(asked.get(name)) : null);
  const [token, layer, group] = [number("t", numTokens), number("l", layers.length), number("g", 1e6)];
  if (layer !== null || group !== null) choose(layer ?? state.layer, group ?? state.group);
  if (token !== null) pin(token);
}

const KEYS = {
  ArrowLeft: () => pin(Math.max(0, (state.token ?? 1) - 1)),
  ArrowRight: () => pin(Math.min(numTokens - 1, (state.token ?? -1) + 1)),
  ArrowUp: () => choose(Math.max(0, state.layer - 1), state.group),
  ArrowDown: () => choose(Math.min(layers.length - 1, state.layer + 1), state.group),
  "+": () => choose(state.layer, state.group + 1),
  "-": () => choose(state.layer, state.group - 1),
  Home: () => pin(0),
  End: () => pin(numTokens - 1),
  Escape: () => {
    state.pinned = false;
    if (state.token !== null) fillTitle();
    history.replaceState(null, "", location.pathname + location.search);
  },
};

function listen() {
  const pointed = (event) => event.target.closest(".token")?.dataset.t;
  at("text").addEventListener("pointerover", (event) => {
    if (!state.pinned && pointed(event) !== undefined) point(Number(pointed(event)));
  });
  at("text").addEventListener("click", (event) => {
    if (pointed(event) !== undefined) pin(Number(pointed(event)));
  });
  document.addEventListener("keydown", (event) => {
    const isTaken = event.ctrlKey || event.altKey || event.metaKey || event.target.closest("select, input, summary, a");
    const act = KEYS[event.key];
    if (!act || (isTaken && event.key !== "Escape")) return;
    event.preventDefault();
    act();
  });
  at("layer").addEventListener("change", () => choose(Number(at("layer").value), state.group));
  at("group").addEventListener("change", () => choose(state.layer, Number(at("group").value)));
  at("shown").addEventListener("change", showToken);
  at("numbers").addEventListener("toggle", () => fillTable(layers[state.layer]));
  at("heads").addEventListener("change", () => {
    buildGates(layers[state.layer]);
    showToken();
  });
  at("every").addEventListener("change", () => fillHistograms(layers[state.layer]));
  addEventListener("hashchange", followLink);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    readColors();
    drawMap();
    showToken();
  });
}

async function main() {
  const twin = facts.twin ? `; dense twin: ${facts.twin}` : "";
  at("about").textContent = `Selection explorer: tokens 0 to ${numTokens - 1}, layers 0 to ${layers.length - 1}${twin}.`;
  at("layer").append(...layers.map((layer) => element("option", { value: layer.layer }, layerName(layer))));
  at("shown").append(...Object.entries({ chosen: "chosen blocks", scores: "scores", ...(facts.twin ? { mass: "dense twin" } : {}) }).map(
    ([value, name]) => element("option", { value }, name),
  ));
  readColors();
  buildText();
  buildMap();
  listen();
  showLayer();
  drawMap();
  followLink();
  await load(state.layer);
  for (const layer of layers) {
    await new Promise((done) => setTimeout(done, 4));
    await load(layer.layer);
  }
  document.documentElement.dataset.unpacked = "all";
}

main();
