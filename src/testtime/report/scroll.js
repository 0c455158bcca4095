// Mark what is wider than the screen, so that the style can say that it scrolls sideways.
const mark = () => document.querySelectorAll(".scroll, .wide").forEach(part =>
  part.classList.toggle("over", part.scrollWidth > part.clientWidth + 1));
mark();
addEventListener("resize", mark);
document.querySelectorAll("details").forEach(part => part.addEventListener("toggle", mark));
