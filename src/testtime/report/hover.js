// Show the values of charts in a small box: on hover, on touch, and by the arrow keys while a chart has the focus.
const tip = document.body.appendChild(document.createElement("div"));
tip.className = "tip";
tip.setAttribute("role", "status");
let shown = null;
const hide = () => {
  if (shown) shown.classList.remove("on");
  shown = null;
  tip.classList.remove("on");
};
const show = hit => {
  hide();
  shown = hit;
  hit.classList.add("on");
  tip.textContent = hit.dataset.text;
  tip.classList.add("on");
  const box = hit.getBoundingClientRect(), size = tip.getBoundingClientRect();
  const wide = document.documentElement.clientWidth;
  const left = Math.max(4, Math.min(box.left + box.width / 2 - size.width / 2, wide - size.width - 4));
  const above = box.top - size.height - 6;
  tip.style.transform = `translate(${left}px, ${above < 4 ? box.top + 6 : above}px)`;
};
document.querySelectorAll("svg:has(.hit)").forEach(chart => {
  const hits = [...chart.querySelectorAll(".hit")];
  hits.forEach(hit => {
    const title = hit.querySelector("title");
    hit.dataset.text = title.textContent;
    title.remove();  // not twice
    hit.addEventListener("pointerenter", () => show(hit));
    hit.addEventListener("pointerdown", () => show(hit));
  });
  chart.addEventListener("pointerleave", event => event.pointerType === "mouse" && hide());
  chart.tabIndex = 0;
  chart.addEventListener("blur", hide);
  chart.addEventListener("keydown", event => {
    const move = {ArrowRight: 1, ArrowLeft: -1}[event.key];
    if (event.key === "Escape") hide();
    if (!move) return;
    event.preventDefault();
    const at = hits.indexOf(shown);
    show(hits[at < 0 ? (move > 0 ? 0 : hits.length - 1) : (at + move + hits.length) % hits.length]);
  });
});
addEventListener("scroll", hide, {passive: true, capture: true});
