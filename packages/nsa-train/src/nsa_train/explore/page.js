"use strict";

const BRANCHES = ["cmp", "slc", "win"];
const facts = JSON.parse(document.getElementById("facts").textContent);
const { layers, num_tokens: numTokens } = facts;
const at = (id) => document.getElementById(id);
const choosing = layers.filter((layer) => layer.num_blocks);
const arrays = layers.map(() => null);
const tokens = [];
const blocks = [];
const state = { token: null, layer: (choosing[0] || layers.find((layer) => layer.geometry)).layer, group: 0, pinned: false };
let lit = [];
let colors = {};

// ---- the arrays of a layer -------------------------------------------------------------------------------------------------------

async function unpacked(layer, name) {
  const source = at(`layer${layer}-${name}`);
  if (!source) return null;
  const text = atob(source.textContent);
  const packed = new Uint8Array(text.length);
  for (let index = 0; index < text.length; index++) packed[index] = text.charCodeAt(index);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

async function load(layer) {
  if (arrays[layer]) return;
  const found = {};
  // one after another, so that a pointer is answered in between
  for (const name of ["chosen", "scores", "mass", "gates"]) found[name] = await unpacked(layer, name);
  for (const name of ["scores", "mass"]) found[`${name}-largest`] = new Float32Array((await unpacked(layer, `${name}-largest`))?.buffer || 0);
  arrays[layer] = found;
  drawMap();
  if (layer === state.layer) showToken();
}

const widthOf = (layer) => layer.geometry.selection_block_size;
const ownOf = (layer, token) => Math.floor(token / widthOf(layer));

function isChosen(layer, token, group, block) {
  const bytes = Math.ceil(layer.num_blocks / 8);
  const row = (token * layer.num_kv_heads + group) * bytes;
  return (arrays[layer.layer].chosen[row + (block >> 3)] >> (block & 7)) & 1;
}

function isForced(layer, token, block) {
  const { num_initial_blocks: initial, num_local_blocks: local } = layer.geometry;
  return block < initial || block > ownOf(layer, token) - local;
}

// of the largest one; of each token there are the candidates 0 .. own alone, KV head after KV head
function shareOf(layer, name, token, group, block) {
  const own = ownOf(layer, token);
  const width = widthOf(layer);
  const before = (width * own * (own + 1)) / 2 + (token - own * width) * (own + 1);
  const level = arrays[layer.layer][name][before * layer.num_kv_heads + group * (own + 1) + block] / 255;
  return level * level;
}

function sharesOf(layer, name, token, group) {
  const shares = [];
  for (let block = 0; block <= ownOf(layer, token); block++) shares.push(shareOf(layer, name, token, group, block));
  return shares;
}

const largestOf = (layer, name, token, group) => arrays[layer.layer][`${name}-largest`][token * layer.num_kv_heads + group];

function gateOf(layer, token, head, branch) {
  return arrays[layer.layer].gates[(token * layer.num_heads + head) * 3 + BRANCHES.indexOf(branch)] / 255;
}

// ---- the text --------------------------------------------------------------------------------------------------------------------

const HIDDEN = /[\u0000-\u001f\u007f-\u00a0\u00ad\u061c\u200b-\u200f\u2028-\u202f\u2060-\u206f\u3000\ufe00-\ufe0f\ufeff\ufff9-\ufffb]/;
const SHOWN = { " ": "\u00b7\u200b", "\n": "\u21b5\n", "\t": "\u2192\t" };

function element(name, attributes = {}, ...children) {
  const made = Object.assign(document.createElement(name), attributes);
  made.append(...children);
  return made;
}

function visible(character) {
  if (character in SHOWN) return element("i", {}, SHOWN[character]);
  if (!HIDDEN.test(character)) return character;
  return element("i", {}, `\u27e8U+${character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}\u27e9`);
}

function tokenElement(index) {
  const piece = facts.token_texts[index];
  const span = element("span", { className: "token" });
  span.dataset.t = index;
  if (!piece) span.append(element("i", {}, "+"));
  // characters that are joined to those around them stay in one piece
  else if (/[ \n\t]/.test(piece) || HIDDEN.test(piece)) span.append(...[...piece].map(visible));
  else span.append(piece);
  return span;
}

const gcd = (a, b) => (b ? gcd(b, a % b) : a);
const sizes = layers.filter((layer) => layer.geometry).map(widthOf);
const unit = sizes.reduce(gcd);

function buildText() {
  for (let first = 0; first < numTokens; first += unit) {
    const block = element("span", { className: "block" });
    block.dataset.first = first;
    for (let index = first; index < Math.min(first + unit, numTokens); index++) tokens.push(block.appendChild(tokenElement(index)));
    blocks.push(block);
  }
  at("text").append(...blocks);
}

function inText(layer, block) {
  const parts = widthOf(layer) / unit;
  return blocks.slice(block * parts, (block + 1) * parts);
}

function lightBlocks(layer) {
  for (const block of lit) {
    block.className = "block";
    block.style.removeProperty("--share");
  }
  lit = [];
  if (state.token === null || !layer.num_blocks || !arrays[layer.layer]) return;
  const shown = at("shown").value;
  const shares = shown === "chosen" ? [] : sharesOf(layer, shown, state.token, state.group);
  for (let block = 0; block <= ownOf(layer, state.token); block++) {
    if (shown === "chosen" && !isChosen(layer, state.token, state.group, block)) continue;
    for (const part of inText(layer, block)) {
      lit.push(part);
      if (shown !== "chosen") {
        part.classList.add("shade");
        part.style.setProperty("--share", (0.9 * Math.sqrt(shares[block])).toFixed(3));
      } else part.classList.add(isForced(layer, state.token, block) ? "forced" : "free");
    }
  }
}

// ---- strips and map --------------------------------------------------------------------------------------------------------------

function readColors() {
  const style = getComputedStyle(document.documentElement);
  const rgb = (name) => {
    const text = style.getPropertyValue(`--${name}`).trim();
    return text.startsWith("#") ? [1, 3, 5].map((index) => parseInt(text.slice(index, index + 2), 16)) : text.split(",").map(Number);
  };
  colors = Object.fromEntries(["free", "forced", "shade", "soft", "paper", "line"].map((name) => [name, rgb(name)]));
}

const mixed = (from, to, share) => from.map((value, index) => value + (to[index] - value) * share);

function put(image, x, y, color) {
  image.data.set(color, 4 * (y * image.width + x));
  image.data[4 * (y * image.width + x) + 3] = 255;
}

function chosenColor(layer, group, block) {
  if (block > ownOf(layer, state.token)) return colors.paper;
  if (!isChosen(layer, state.token, group, block)) return colors.line;
  return isForced(layer, state.token, block) ? colors.forced : colors.free;
}

function drawStrip(canvas, layer, name, group) {
  const context = canvas.getContext("2d");
  const image = context.createImageData(layer.num_blocks, 1);
  const shares = name === "chosen" ? [] : sharesOf(layer, name, state.token, group);
  for (let block = 0; block < layer.num_blocks; block++) {
    if (name === "chosen") put(image, block, 0, chosenColor(layer, group, block));
    else put(image, block, 0, block < shares.length ? mixed(colors.soft, colors.shade, Math.sqrt(shares[block])) : colors.paper);
  }
  context.putImageData(image, 0, 0);
}

const lines = [];
const linesOf = (layer) => (layer.num_blocks ? layer.num_kv_heads : 1);

function buildMap() {
  const most = Math.max(...layers.map(linesOf));
  const height = layers.length * (most + 1);
  for (const layer of layers) {
    for (let group = 0; group < linesOf(layer); group++) lines.push({ layer, group, y: layer.layer * (most + 1) + group });
  }
  const map = at("map");
  map.width = blocks.length;
  map.height = height;
  const scale = Math.max(3, Math.ceil(12 / (most + 1)));
  map.style.height = `${height * scale}px`;
  for (const { layer, y } of lines.filter((line) => line.group === 0)) {
    const label = element("span", {}, layerName(layer));
    label.style.top = `${y * scale}px`;
    label.dataset.layer = layer.layer;
    at("rows").append(label);
  }
  const lineAt = (event) => {
    const y = ((event.clientY - map.getBoundingClientRect().top) / map.getBoundingClientRect().height) * height;
    return lines.findLast((line) => line.y <= y);
  };
  map.addEventListener("click", (event) => choose(lineAt(event).layer.layer, lineAt(event).group));
}

function drawMap() {
  const map = at("map");
  const context = map.getContext("2d");
  const image = context.createImageData(map.width, map.height);
  for (const { layer, group, y } of lines) {
    const isKnown = layer.num_blocks && arrays[layer.layer] && state.token !== null;
    const parts = layer.num_blocks ? widthOf(layer) / unit : 1;
    for (let x = 0; x < map.width; x++) put(image, x, y, isKnown ? chosenColor(layer, group, Math.floor(x / parts)) : colors.soft);
  }
  context.putImageData(image, 0, 0);
}

// ---- the panel -------------------------------------------------------------------------------------------------------------------

function layerName(layer) {
  if (!layer.geometry) return `${layer.layer}, dense`;
  return layer.num_blocks ? `${layer.layer}` : `${layer.layer}, no choice`;
}

const STRIPS = { chosen: "chosen", scores: "score", mass: "dense twin" };
const stripsOf = (layer) => Object.keys(STRIPS).filter((name) => at(`layer${layer.layer}-${name}`));
let strips = [];
let meters = [];

function buildStrips(layer) {
  strips = [];
  at("blocks").replaceChildren();
  for (let group = 0; layer.num_blocks && group < layer.num_kv_heads; group++) {
    const strip = element("div", { className: "strip group" }, element("b", {}, `layer ${layer.layer}, KV head ${group}`));
    strip.dataset.group = group;
    for (const name of stripsOf(layer)) {
      const canvas = element("canvas", { width: layer.num_blocks, height: 1 });
      canvas.setAttribute("aria-hidden", "true");
      canvas.addEventListener("pointermove", (event) => describeCell(layer, group, blockAt(canvas, layer, event)));
      canvas.addEventListener("pointerleave", () => describeCell(layer, group, null));
      canvas.addEventListener("click", (event) => {
        choose(layer.layer, group);
        inText(layer, blockAt(canvas, layer, event))[0].scrollIntoView({ block: "nearest" });
      });
      strip.append(element("span", {}, STRIPS[name]), canvas);
      strips.push({ canvas, name, group });
    }
    at("blocks").append(strip);
  }
}

function blockAt(canvas, layer, event) {
  const { left, width } = canvas.getBoundingClientRect();
  return Math.max(0, Math.min(layer.num_blocks - 1, Math.floor(((event.clientX - left) / width) * layer.num_blocks)));
}

const percent = (share) => `${(100 * share).toFixed(1)} %`;
const tokensOf = (layer, block) => `${block * widthOf(layer)} to ${Math.min((block + 1) * widthOf(layer), numTokens) - 1}`;

function cells(layer, group, block) {
  const why = !isChosen(layer, state.token, group, block) ? "not chosen" : isForced(layer, state.token, block) ? "always" : "by score";
  const names = stripsOf(layer).filter((name) => name !== "chosen");
  const values = names.map((name) => shareOf(layer, name, state.token, group, block) * largestOf(layer, name, state.token, group));
  return [block, tokensOf(layer, block), why, ...values.map((value, index) => (names[index] === "mass" ? percent(value) : value.toFixed(4)))];
}

function describeCell(layer, group, block) {
  for (const peeked of document.querySelectorAll(".block.peek")) peeked.classList.remove("peek");
  at("cell").textContent = "\u00a0";
  if (block === null || state.token === null || !arrays[layer.layer]) return;
  for (const part of inText(layer, block)) part.classList.add("peek");
  const [, range, ...rest] = block > ownOf(layer, state.token) ? [block, tokensOf(layer, block), "after the token"] : cells(layer, group, block);
  const named = rest.map((value, index) => (index === 1 ? `score ${value}` : index === 2 ? `dense twin ${value}` : value));
  at("cell").textContent = `block ${block}, tokens ${range}: ${named.join(", ")}`;
}

function fillTable(layer) {
  const isShown = at("numbers").open && state.token !== null && layer.num_blocks && arrays[layer.layer];
  at("numbers").hidden = !layer.num_blocks;
  if (!isShown) return at("table").replaceChildren();
  const titles = ["block", "tokens", "chosen", "score", ...(stripsOf(layer).includes("mass") ? ["dense twin"] : [])];
  const rows = [element("tr", {}, ...titles.map((title) => element("th", { scope: "col" }, title)))];
  for (let block = 0; block <= ownOf(layer, state.token); block++) {
    if (isChosen(layer, state.token, state.group, block)) {
      rows.push(element("tr", {}, ...cells(layer, state.group, block).map((cell) => element("td", {}, String(cell)))));
    }
  }
  return at("table").replaceChildren(...rows);
}

function headsOf(layer) {
  if (at("heads").checked) return [...Array(layer.num_heads).keys()].map((head) => [`head ${head}`, [head]]);
  const size = layer.num_heads / layer.num_kv_heads;
  return [...Array(layer.num_kv_heads).keys()].map((group) => [`KV head ${group}`, [...Array(size).keys()].map((head) => group * size + head)]);
}

function buildGates(layer) {
  meters = [];
  const table = at("gates");
  table.replaceChildren();
  if (!layer.geometry) return;
  table.append(element("tr", {}, element("th"), ...layer.branches.map((branch) => element("th", { scope: "col" }, branch))));
  for (const [name, heads] of headsOf(layer)) {
    const row = element("tr", {}, element("th", { scope: "row" }, name));
    for (const branch of layer.branches) {
      const bar = element("i");
      const value = element("b", { style: "font-weight: 400" }, "\u2013");
      bar.style.width = "0";
      meters.push({ bar, value, heads, branch });
      row.append(element("td", {}, element("div", { className: "meter" }, element("span", {}, bar), value)));
    }
    table.append(row);
  }
}

function fillGates(layer) {
  for (const { bar, value, heads, branch } of meters) {
    const mean = heads.reduce((sum, head) => sum + gateOf(layer, state.token, head, branch), 0) / heads.length;
    bar.style.width = percent(mean).replace(" ", "");
    value.textContent = mean.toFixed(2);
  }
}

function plot(caption, counts, [least, largest], describe) {
  const most = Math.max(...counts, 1);
  const total = counts.reduce((sum, count) => sum + count, 0);
  const bars = counts.map((count, index) => {
    const bar = element("i", { title: `${describe(index)}: ${count.toLocaleString("en")} (${percent(total ? count / total : 0)})` });
    bar.style.height = `${(100 * count) / most}%`;
    return bar;
  });
  const label = `${caption}: ${bars.filter((bar, index) => counts[index]).map((bar) => bar.title).join("; ") || "none"}`;
  const shown = element("div", { className: "bars" }, ...bars);
  shown.setAttribute("role", "img");
  shown.setAttribute("aria-label", label);
  const ends = element("div", { className: "ends" }, element("span", {}, least), element("span", {}, largest));
  return element("figure", {}, element("figcaption", {}, caption), shown, ends);
}

const sums = (rows) => (rows.length ? rows[0].map((_, index) => rows.reduce((sum, row) => sum + row[index], 0)) : []);

function fillHistograms(layer) {
  const shown = at("every").checked ? layers.filter((one) => one.geometry) : layer.geometry ? [layer] : [];
  const plots = BRANCHES.filter((branch) => shown.some((one) => one.gate_histogram[branch])).map((branch) => {
    const counts = sums(shown.map((one) => one.gate_histogram[branch]).filter(Boolean));
    const bin = (index) => `${branch} gate ${(index / counts.length).toFixed(2)} to ${((index + 1) / counts.length).toFixed(2)}`;
    return plot(`${branch} gates, heads and tokens`, counts, ["0", "1"], bin);
  });
  const longest = shown.map((one) => one.distance_histogram).reduce((a, b) => (b.length > a.length ? b : a), []);
  if (longest.length) {
    const counts = longest.map((_, index) => shown.reduce((sum, one) => sum + (one.distance_histogram[index]?.blocks || 0), 0));
    const bin = ({ first, last }) => (first === last ? `${first}` : `${first} to ${last}`);
    const ends = [bin(longest[0]), bin(longest[longest.length - 1])];
    plots.push(plot("distance of blocks chosen by score, in blocks", counts, ends, (index) => `${bin(longest[index])} blocks before`));
  }
  const note = !plots.length
    ? "A dense layer has neither gates nor a choice."
    : longest.length
      ? "Distances double from bar to bar; 1 is the block before the token\u2019s own. They are of tokens with more blocks before them than a token may choose."
      : "No token chose a block by score: none has more blocks before it than a token may choose.";
  at("histograms").replaceChildren(element("div", { className: "plots" }, ...plots), element("p", { className: "note" }, note));
}

// ---- one token, one layer, one KV head -------------------------------------------------------------------------------------------

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

function fillTitle() {
  const piece = facts.token_texts[state.token];
  const shown = piece ? JSON.stringify(piece) : "more of the character before";
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
