"""What the results of a script say, drawn: functions from a JSON's dict to a figure and a few sentences of Markdown.

A library has one colour and one marker in every picture, told apart in grey, too; a title says what has been found.
"""
