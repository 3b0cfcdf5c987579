"""Several router processes behind one address: who starts and watches them, shows the whole."""
