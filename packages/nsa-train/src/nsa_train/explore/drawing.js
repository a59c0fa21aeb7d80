// The text as tokens with lit blocks, the strips of a layer, and the map of all layers.

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
