// One expression for tools/check_pages.py, evaluated in a loaded page: a list of [rule, element].
(async () => {
  const found = [];
  const name = (element) => {
    const words = [element.id && `#${element.id}`, ...element.classList].filter(Boolean).join(" ");
    const text = element.textContent.trim().replace(/\s+/g, " ").slice(0, 60);
    return `<${element.localName}${words && ` ${words}`}> ${JSON.stringify(text)}`;
  };
  const report = (rule, element, detail = "") => found.push([rule, `${name(element)}${detail && ` ${detail}`}`]);

  // without transitions bootstrap opens a list at once, and what collapses or covers the page after timers of 5 ms
  const style = document.createElement("style");
  style.textContent = "* { transition: none !important; animation: none !important; scroll-behavior: auto !important; }";
  document.head.append(style);
  const settled = (toggle) => new Promise((done) => setTimeout(done, toggle.dataset.bsToggle === "dropdown" ? 0 : 25));

  const seen = (element) => element.checkVisibility({ visibilityProperty: true, contentVisibilityAuto: true });
  const within = (box, vertically) =>
    box.left >= -0.5 && box.right <= innerWidth + 0.5 && (!vertically || (box.top >= -0.5 && box.bottom <= innerHeight + 0.5));

  // on the screen, or in something that scrolls and is itself on the screen
  const reachable = (element, vertically) => {
    if (within(element.getBoundingClientRect(), vertically)) return true;
    for (let parent = element.parentElement; parent && parent !== document.body; parent = parent.parentElement) {
      const { overflowX, overflowY } = getComputedStyle(parent);
      if (/auto|scroll/.test(vertically ? overflowY : overflowX) && within(parent.getBoundingClientRect(), vertically)) return true;
    }
    return false;
  };

  // names the outermost element of each kind only: its children stick out with it
  const outermost = (rule, elements, isWrong, detail) => {
    const named = [];
    for (const element of elements) {
      if (named.some((other) => other.contains(element)) || !seen(element) || !isWrong(element)) continue;
      named.push(element);
      report(rule, element, detail(element));
    }
  };

  const px = (element) => {
    const box = element.getBoundingClientRect();
    return `(${Math.round(box.left)} to ${Math.round(box.right)} of ${innerWidth}, ${Math.round(box.top)} to ${Math.round(box.bottom)} of ${innerHeight})`;
  };
  const everything = () => document.body.querySelectorAll("*");
  const lookAtWidths = () => {
    const { scrollWidth } = document.documentElement;
    if (scrollWidth > innerWidth) found.push(["page wider than the screen", `${scrollWidth} of ${innerWidth}`]);
    outermost("wider than the screen", everything(), (element) => !reachable(element, false), px);
    const cutsOff = (element) => {
      const { overflowX, display } = getComputedStyle(element);
      return /hidden|clip/.test(overflowX) && display !== "inline" && element.scrollWidth > element.clientWidth + 1;
    };
    // as bootstrap has it: "extra large" begins at 1,200 pixels
    const scrolls = (table) => innerWidth >= 1200 && table.scrollWidth > table.clientWidth + 1;
    outermost("a table that scrolls on a wide screen", document.querySelectorAll("table"), scrolls, px);
    outermost("cut off", everything(), cutsOff, (element) => `(${element.scrollWidth} in ${element.clientWidth})`);
  };

  lookAtWidths();
  const insideWord = ({ previousSibling, nextSibling }) =>
    /\w$/.test(previousSibling?.textContent ?? "") || /^\w/.test(nextSibling?.textContent ?? "");
  for (const element of document.querySelectorAll("em, strong")) {
    const isFormula = element.localName === "em" && /\.\.|\d/.test(element.textContent);
    if (isFormula || insideWord(element)) report("a formula became emphasis", element);
  }

  // what stays in place while the page scrolls must fit the screen, or scroll by itself
  const stays = (element) => {
    const { position, top } = getComputedStyle(element);
    if (!/fixed|sticky/.test(position) || element.getAttribute("role") === "dialog") return false;
    return (parseFloat(top) || 0) + element.getBoundingClientRect().height > innerHeight + 0.5;
  };
  outermost("taller than the screen and fixed to it", everything(), stays, px);

  // every menu, those inside others after them; what opened stays open until its children were looked at
  const toggled = (toggle) => {
    const target = toggle.dataset.bsTarget;
    return target ? document.querySelector(target) : toggle.nextElementSibling;
  };
  const looked = new Set();
  const lookAtMenus = async (scope) => {
    for (const toggle of scope.querySelectorAll("[data-bs-toggle], .dropdown-submenu > a")) {
      const menu = toggled(toggle);
      if (looked.has(menu) || !seen(toggle)) continue;
      looked.add(menu);
      if (!reachable(toggle, true)) report("a menu's button off the screen", toggle, px(toggle));
      toggle.scrollIntoView({ block: "nearest" });
      toggle.click();
      await settled(toggle);
      if (!seen(menu)) {
        report("a menu that does not open", toggle);
        continue;
      }
      outermost("a menu off the screen", [menu, ...menu.querySelectorAll("*")], (element) => !reachable(element, true), px);
      await lookAtMenus(menu);
      if (menu.classList.contains("modal")) bootstrap.Modal.getInstance(menu).hide();
      else toggle.click();
      await settled(toggle);
    }
  };
  await lookAtMenus(document);
  return found;
})()
